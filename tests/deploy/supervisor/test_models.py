"""Several models in one deployment: their services, what each is told, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigurationError
from common.settings import Settings
from deploy.supervisor.command import read_arguments
from deploy.supervisor.layout import Layout, PlannedGroup, Replicas, plan_layout

RUN = Path("/run/pando/8000")


def layout_of(models: dict[str, Any], **sections: Any) -> Layout:
    return plan_layout(Settings.model_validate({"models": models, **sections}), RUN)


def test_each_model_has_separate_services_and_all_share_the_gateway() -> None:
    layout = layout_of({"small": "smollm2-135m-instruct", "org/large": {"reference": "/m", "tp": 2}})
    assert [spec.name for spec in layout.services] == [
        "small/worker",
        "small/detokenizer",
        "org-large/worker-0",
        "org-large/worker-1",
        "org-large/detokenizer",
        "small/scheduler",
        "small/tokenizer",
        "org-large/scheduler",
        "org-large/tokenizer",
        "gateway",
    ]
    assert layout.models == {"small": "small/", "org/large": "org-large/"}
    for model, prefix in layout.models.items():
        its = {name: layout.find(f"{prefix}{name}") for name in ("tokenizer", "scheduler", "detokenizer")}
        backend = layout.find("gateway").settings.gateway.models[model]
        assert backend.tokenizer == (its["tokenizer"].address,)
        assert backend.detokenizer == its["scheduler"].settings.scheduler.detokenizer == (its["detokenizer"].address,)
        assert backend.schedulers == its["tokenizer"].settings.tokenizer.schedulers == (its["scheduler"].address,)
        assert {spec.settings.model.name for spec in its.values()} == {model}
    assert len({spec.address for spec in layout.services}) == len(layout.services)
    workers = [layout.find(f"org-large/worker-{rank}") for rank in range(2)]
    scheduler = layout.find("org-large/scheduler").settings.scheduler
    assert scheduler.workers == tuple(worker.address for worker in workers)
    assert {worker.group for worker in workers} == {"org-large/worker"}


def test_settings_of_a_model_override_shared_settings() -> None:
    layout = layout_of(
        {
            "small": {"aliases": ["gpt"], "scheduler": {"max_rows": 3}, "max_context": 128},
            "large": {"dtype": "float16"},
        },
        model={"load_format": "fake"},
        scheduler={"max_rows": 7, "max_step_tokens": 64},
        gateway={"default_model": "large"},
    )
    small, large = layout.find("small/scheduler").settings, layout.find("large/scheduler").settings
    assert (small.scheduler.max_rows, small.scheduler.max_step_tokens) == (3, 64)
    assert (large.scheduler.max_rows, large.scheduler.max_step_tokens) == (7, 64)
    assert (small.model.load_format, small.model.max_context, small.model.dtype) == ("fake", 128, "auto")
    assert (large.model.load_format, large.model.max_context, large.model.dtype) == ("fake", 0, "float16")
    assert layout.find("gateway").settings.gateway.models["small"].aliases == ("gpt",)
    assert layout.model == "large"


def test_models_take_devices_one_after_the_other_unless_they_say_which() -> None:
    layout = layout_of(
        {"a": {"tp": 2}, "b": "x", "c": {"worker": {"device_index": 0}}}, worker={"device_index": 1, "threads": 1}
    )
    devices = {spec.name: spec.settings.worker.device_index for spec in layout.services if "worker" in spec.name}
    assert devices == {"a/worker-0": 1, "a/worker-1": 2, "b/worker": 3, "c/worker": 0}


def test_a_flag_without_a_value_turns_on_expert_parallelism() -> None:
    settings, arguments = read_arguments(["--tp", "2", "--expert-parallel"])
    assert arguments.tp == 2
    assert settings.scheduler.expert_parallel
    assert not read_arguments(["--tp", "2"])[0].scheduler.expert_parallel


def test_models_that_share_a_device_take_turns_on_it() -> None:
    settings, _ = read_arguments(["--models", '{"a": {"tp": 2}, "b": "x"}', "--share-device"])
    layout = plan_layout(settings, RUN)
    workers = {spec.name: spec.settings for spec in layout.services if "worker" in spec.name}
    assert {name: its.worker.device_index for name, its in workers.items()} == {
        "a/worker-0": 0, "a/worker-1": 1, "b/worker": 0,
    }  # fmt: skip
    schedulers = [layout.find(f"{name}/scheduler").settings for name in ("a", "b")]
    for each in (*workers.values(), *schedulers):
        assert each.scheduler.device_turns.enabled
        assert each.scheduler.device_turns.directory == RUN / "turns"
    with pytest.raises(ConfigurationError, match="--roles"):
        plan_layout(settings, RUN, replicas=Replicas(groups=(PlannedGroup(), PlannedGroup())))


def test_names_that_map_to_the_same_file_name_get_distinct_prefixes() -> None:
    layout = layout_of({"a/b": "x", "a-b": "x", "///": "x"})
    assert list(layout.models.values()) == ["a-b/", "a-b-2/", "model/"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": {"scheduler": {"max_rwos": 3}}}, "models.a.scheduler: unknown setting: max_rwos"),
        ({"a": {"worker": {"threads": -1}}}, "models.a.worker: threads"),
        ({"a\nb": "x"}, "control"),
        ({"a": {"scheduler": {"metrics_port": 9000}}, "b": {"scheduler": {"metrics_port": 9000}}}, "port 9000"),
    ],
)
def test_errors_in_a_model_s_settings_name_the_setting(models: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        layout_of(models)


def test_a_model_s_own_settings_are_merged_section_by_section() -> None:
    layout = layout_of(
        {"a": {"scheduler": {"cache": {"eviction": "lfu"}}}, "b": "x"},
        scheduler={"cache": {"mode": "isolated", "epoch_seconds": 3}},
    )
    own, shared = (layout.find(f"{name}/scheduler").settings.scheduler.cache for name in "ab")
    assert (own.mode, own.epoch_seconds, own.eviction) == ("isolated", 3, "lfu")
    assert shared.eviction == "lru"


def test_a_secret_of_one_model_that_does_not_fit_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match=r"models\.a\.scheduler: storage\.secret") as refused:
        layout_of({"a": {"scheduler": {"storage": {"secret": "hush-hush"}}}})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("gateway", "message"),
    [({"port": 9000, "metrics_port": 9000}, "both 9000"), ({"port": 8000, "metrics_port": 9092}, "port 9092")],
)
def test_the_gateway_s_metrics_need_a_separate_port(gateway: dict[str, int], message: str) -> None:
    settings = Settings.model_validate({"gateway": gateway, "scheduler": {"metrics_port": 9092}})
    with pytest.raises(ConfigurationError, match=message):
        plan_layout(settings, RUN)


def test_with_several_models_ranks_are_set_per_model() -> None:
    with pytest.raises(ConfigurationError, match="tp"):
        plan_layout(Settings.model_validate({"models": {"a": "x"}}), RUN, ranks=2)


def test_the_command_line_takes_several_models() -> None:
    settings, _ = read_arguments(["--models", "small=one", "--models", "large=/models/two"])
    assert {name: model.reference for name, model in settings.models.items()} == {
        "small": "one",
        "large": "/models/two",
    }
    settings, _ = read_arguments(["--models", '{"large": {"reference": "two", "tp": 2}}'])
    assert settings.models["large"].tp == 2
    with pytest.raises(ConfigurationError):
        read_arguments(["--models", "nameless"])
    with pytest.raises(ConfigurationError, match="served by its name"):
        read_arguments(["--models", '{"a": {"served_name": "b"}}'])

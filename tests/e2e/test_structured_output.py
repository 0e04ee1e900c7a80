"""Outputs that conform, over all five services and the real model."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import httpx
import jsonschema
import pytest
from openai import BadRequestError
from pydantic import BaseModel, Field

from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.waiting import until, wait_until

if TYPE_CHECKING:
    from tests.e2e.served import Served

CHAT: Any = [{"role": "user", "content": "Tell me about the weather in Paris."}]
REPORT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 40},
            "minItems": 1,
            "maxItems": 3,
        },
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "days", "sunny"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</n>"}
FORECAST = {
    "type": "object",
    "properties": {
        "forecast_for_city": {"enum": ["Paris", "Rome"]},
        "temperature_celsius": {"type": "integer", "minimum": 0, "maximum": 40},
        "chance_of_precipitation": {"enum": ["low", "high"]},
        "is_public_holiday": {"type": "boolean"},
    },
    "required": ["forecast_for_city", "temperature_celsius", "chance_of_precipitation", "is_public_holiday"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 40, "maxItems": 40}


class Reading(BaseModel):
    hour: int = Field(ge=0, le=23)
    sky: Literal["clear", "cloudy"]


class Report(BaseModel):
    city: Literal["Paris", "Rome"]
    readings: list[Reading] = Field(min_length=1, max_length=2)
    is_warm: bool | None


def format_of(schema: object, *, strict: bool = True) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}


def chat(served: Served, schema: object, **fields: Any) -> Any:
    return served.client().chat.completions.create(
        model=served.model,
        messages=CHAT,
        max_tokens=fields.pop("max_tokens", 200),
        response_format=format_of(schema),
        **fields,
    )


def generate(served: Served, **sampling: Any) -> str:
    with served.http() as http:
        answer = http.post(
            "/generate", json={"text": "Here it is: ", "sampling_params": {"max_new_tokens": 60, **sampling}}
        )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["text"]
    return text


def test_the_sdk_parses_answers_into_pydantic_models(served: Served) -> None:
    chat_client, responses = served.client().chat.completions, served.client().responses
    answer = chat_client.parse(model=served.model, messages=CHAT, response_format=Report, max_tokens=200, temperature=1)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Report)
    response = responses.parse(model=served.model, input="Weather?", text_format=Report, max_output_tokens=200)
    assert isinstance(response.output_parsed, Report)


def test_choices_that_are_streamed_conform_each(served: Served) -> None:
    texts: dict[int, str] = {0: "", 1: ""}
    finishes: dict[int, str | None] = {}
    for event in chat(served, REPORT, n=2, stream=True, seed=3, temperature=1.3):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes.get(choice.index)
    for text in texts.values():
        jsonschema.validate(json.loads(text), REPORT)
    assert finishes == {0: "stop", 1: "stop"}


def test_each_parameter_for_a_format_is_honoured(served: Served) -> None:
    complete = served.client().completions
    plain: Any = {"model": served.model, "prompt": "x", "max_tokens": 60}
    for field, value, pattern in (
        ("regex", "[a-c]{3}-[0-9]{2}", "[a-c]{3}-[0-9]{2}"),
        ("guided_regex", "(yes|no)!", "(yes|no)!"),
        ("ebnf", 'root ::= "<" [0-9] [0-9]? ">"', "<[0-9]{1,2}>"),
        ("guided_grammar", 'root ::= "a" | "b" "c"', "a|bc"),
        ("guided_choice", ['say "hi"', "grün", "🙂"], 'say "hi"|grün|🙂'),
        ("structured_outputs", {"choice": ["left", "right"]}, "left|right"),
        ("structural_tag", {"type": "structural_tag", "format": TAG}, "<n>[0-9]</n>"),
    ):
        [choice] = complete.create(extra_body={field: value}, **plain).choices
        assert re.fullmatch(pattern, choice.text), (field, choice.text)
        assert choice.finish_reason == "stop"
    assert re.fullmatch("[0-9]{4}", generate(served, regex="[0-9]{4}"))
    jsonschema.validate(json.loads(generate(served, json_schema=json.dumps(REPORT))), REPORT)
    answer = chat(served, {"type": "object", "properties": {}, "additionalProperties": False})
    assert answer.choices[0].message.content == "{}"


def test_other_sampling_parameters_work_together_with_a_grammar(served: Served) -> None:
    def text_of(**fields: Any) -> str:
        plain: Any = {"model": served.model, "prompt": "One, two,", "max_tokens": 24, "temperature": 0}
        text: str = served.client().completions.create(extra_body=fields, **plain).choices[0].text
        return text

    with served.http() as http:
        [five] = http.post("/tokenize", json={"prompt": "5", "add_special_tokens": False}).json()["tokens"]
    assert len(text_of(regex="[0-9]+", ignore_eos=True)) == 24
    assert len(text_of(regex="[0-9]+", logit_bias={"0": 100, "2": 100}, min_tokens=9)) == 9
    assert text_of(regex="[0-9]{3}", ignore_eos=True, logit_bias={str(five): 100}) == "555"
    assert "5" not in text_of(regex="[0-9]{24}", bad_words=["5"], logit_bias={str(five): 100})
    assert text_of(regex="5{6}", bad_words=["5"], min_tokens=20) == "555555"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "(abc"}, "regex"),
        ({"ebnf": "root ::= root"}, "ebnf"),
        ({"ebnf": "root ::= other"}, "ebnf"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"json_schema": '{"items":' * 100 + "{}" + "}" * 100}, "json_schema"),
        ({"regex": "a" * 200_000}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_invalid_grammars_are_refused_with_their_parameter_s_name(
    served: Served, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        served.client().completions.create(model=served.model, prompt="x", max_tokens=4, extra_body=body)
    assert refused.value.param == param
    assert served.complete()


def test_others_do_not_wait_for_a_grammar_that_takes_long(served: Served) -> None:
    def ends(max_length: int) -> list[str]:
        ended: list[str] = []

        def slow() -> None:
            # Some seconds to compile.
            chat(served, {"type": "string", "maxLength": max_length}, max_tokens=4)
            ended.append("bound")

        thread = threading.Thread(target=slow)
        thread.start()
        served.complete(max_tokens=2)
        ended.append("free")
        thread.join()
        return ended

    # A busy machine may hold this process up for as long; if others waited, none would ever be first.
    assert any(ends(max_length) == ["free", "bound"] for max_length in (60, 61, 62, 63))


async def test_hostile_grammars_of_one_user_delay_others_little_and_refuse_them_never(served: Served) -> None:
    numbers = iter(range(1000))

    def ask_as_victim() -> None:
        # A schema of its own each time: none is compiled already.
        schema = {"type": "object", "properties": {f"field{next(numbers)}": {"enum": ["a", "b"]}}}
        chat(served, schema, user="victim", max_tokens=4)

    ask_as_victim()
    async with httpx.AsyncClient(base_url=served.url, timeout=300, trust_env=False) as http:

        async def hostile(number: int) -> int:
            fields = {"user": "mallory", "regex": f"[\\u0000-\\uffff]{{0,{100_000 - number}}}"}
            body = {"model": served.model, "prompt": "x", "max_tokens": 2, **fields}
            return (await http.post("/v1/completions", json=body)).status_code

        requests = [asyncio.create_task(hostile(number)) for number in range(24)]
        await until(lambda: any(one.done() for one in requests))  # those beyond the open ones are refused at once
        # Each waits for one slice. Were they served in order, the open ones would have come before.
        for _ in range(3):
            await asyncio.to_thread(ask_as_victim)
        open_requests = [one for one in requests if not one.done()]
        for one in open_requests:
            one.cancel()
        statuses = await asyncio.gather(*requests, return_exceptions=True)
    assert open_requests, "the attack ended before its victim's requests"
    answered = {status for status in statuses if isinstance(status, int)}
    assert 429 in answered
    assert answered <= {200, 400, 429}


def test_the_same_seed_gives_the_same_output_whatever_else_runs(served: Served) -> None:
    def one(seed: int) -> str:
        return str(chat(served, REPORT, seed=seed, temperature=1.2).choices[0].message.content)

    alone = one(11)
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(one, (1, 2, 11, 3, 4)))
    assert together[2] == alone
    assert len(set(together)) > 1


def test_tokens_forced_by_a_grammar_skip_the_forward_pass_and_are_reported_normally(served: Served) -> None:
    def ask(**fields: Any) -> Any:
        return chat(served, FORECAST, seed=4, temperature=1.1, **fields)

    before = served.state().jumped_tokens
    whole = ask(n=2)
    texts = [str(choice.message.content) for choice in whole.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), FORECAST)
    tokens = whole.usage.completion_tokens
    assert served.state().jumped_tokens - before > tokens / 2
    streamed = ["", ""]
    for event in ask(n=2, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    cut = ask(max_tokens=7)
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (7, "length")
    assert texts[0].startswith(str(cut.choices[0].message.content))
    stopped = ask(stop="_celsius").choices[0]
    assert stopped.finish_reason == "stop"
    assert texts[0].split("_celsius")[0] == stopped.message.content
    before = served.state().jumped_tokens
    told = ask(logprobs=True).choices[0]
    assert told.message.content == texts[0]
    *entries, end = told.logprobs.content
    assert "".join(entry.token for entry in entries) == texts[0]
    assert end.token == "<|im_end|>"
    # Theirs are of the model's own distribution, which knows no form: nothing was forced.
    assert any(entry.logprob < -0.5 for entry in entries)
    assert served.state().jumped_tokens == before


@pytest.mark.extended
@pytest.mark.slow
def test_an_output_goes_on_conforming_after_its_worker_was_killed(served: Served) -> None:
    whole = str(chat(served, NUMBERS, seed=5, temperature=1, max_tokens=400).choices[0].message.content)
    text, was_killed = "", False
    for event in chat(served, NUMBERS, seed=5, temperature=1, max_tokens=400, stream=True):
        for choice in event.choices:
            text += choice.delta.content or ""
        if len(text) > 20 and not was_killed:
            served.deployment.kill("worker", signal.SIGKILL)
            was_killed = True
    assert was_killed
    assert text == whole
    jsonschema.validate(json.loads(text), NUMBERS)
    wait_until(served.is_ready, timeout_s=120)


@pytest.fixture(scope="module")
def written(served: Served) -> dict[str, Any]:
    """What the model writes to each schema, eight at a time."""

    def write(name: str) -> Any:
        return chat(served, CORPUS[name], temperature=0.7, seed=1, max_tokens=400).choices[0]

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(CORPUS, pool.map(write, CORPUS), strict=True))


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CORPUS)
def test_the_real_model_writes_valid_json(written: dict[str, Any], name: str) -> None:
    answer = written[name]
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(str(answer.message.content)), CORPUS[name])

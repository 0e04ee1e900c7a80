"""What the shipped rules find and what they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.evaluation.experiments.content_check import SUFFIXES, examine
from services.scheduler.content.interface import ContentFinding, DetectorOptions, RulesError
from services.scheduler.content.patterns import PatternDetector, parse_rules
from tests.services.scheduler.content.corpus import NEAR_MISSES, POSITIVES, SENTENCES, drawn

RULE = """
[[rules]]
name = "animal"
pattern = '\\b(?:cat|dog)\\b'
"""


@pytest.fixture(scope="module")
def detector() -> PatternDetector:
    detector = PatternDetector(DetectorOptions())
    detector.refresh()
    return detector


def found(detector: PatternDetector, text: str) -> dict[str, int]:
    return {finding.rule: finding.start for finding in detector.find(text)}


@pytest.mark.parametrize(("rule", "value"), [(rule, value) for rule, values in POSITIVES.items() for value in values])
def test_each_secret_is_found_in_every_sentence_by_its_rule(detector: PatternDetector, rule: str, value: str) -> None:
    for sentence in SENTENCES:
        text = sentence.format(value)
        findings = found(detector, text)
        assert rule in findings, text
        # Nothing of the secret comes before the cut; a name before it may.
        names = len(value) - 8 if rule == "assigned_secret" else 0
        assert min(findings.values()) <= text.index(value) + names


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_near_misses_of_secrets_are_not_reported(detector: PatternDetector, text: str) -> None:
    assert found(detector, text) == {}


def test_every_rule_that_ships_has_positives(detector: PatternDetector) -> None:
    assert {rule.name for rule in detector._rules} == set(POSITIVES)


@pytest.mark.parametrize(
    ("rule", "value", "least"),
    [
        ("sk_key", f"sk-{drawn(48)}", 6),
        ("aws_access_key", f"AKIA{drawn(16, 'ABCDEFGH2345')}", 6),
        ("github_token", f"ghp_{drawn(36)}", 6),
        ("private_key", "-----BEGIN RSA PRIVATE KEY-----", 12),
        ("huggingface_token", f"hf_{drawn(34)}", 8),
    ],
)
def test_a_secret_that_the_text_ends_in_is_found_by_its_beginning(
    detector: PatternDetector, rule: str, value: str, least: int
) -> None:
    for length in range(least, len(value)):
        text = f"Use this: {value[:length]}"
        assert found(detector, text).get(rule) == 10, text


def test_hostile_patterns_and_hostile_texts_take_linear_time(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(r"""
[[rules]]
name = "backtracking"
pattern = '(a+)+b|(x+x+)+y|([a-zA-Z]+)*\d$'
""")
    detector = PatternDetector(DetectorOptions(str(rules)))
    detector.refresh()
    # A backtracking engine would not end in this universe.
    assert found(detector, "a" * 200_000 + "x" * 200_000) == {}


def test_rules_are_read_again_when_the_file_changes(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULE)
    detector = PatternDetector(DetectorOptions(str(rules)))
    first = detector.refresh()
    assert found(detector, "a cat and a cow") == {"animal": 2}
    assert detector.refresh() == first
    rules.write_text(RULE.replace("cat|dog", "cow"))
    assert detector.refresh() != first
    assert found(detector, "a cat and a cow") == {"animal": 12}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "rules"),
        ("rules = []", "at least 1"),
        ("[[rules]]\nname = 'x'", "pattern"),
        ("[[rules]]\nname = 'x'\npattern = '(a'", "missing )"),
        ("[[rules]]\nname = 'x'\npattern = '(?<!a)b'", "invalid perl operator"),
        ("[[rules]]\nname = 'x'\npattern = 'a*'", "everywhere"),
        ("[[rules]]\nname = 'x'\npattern = 'a'\ncolour = 'red'", "colour"),
        ("[[rules]]\nname = 'x'\npattern = 'a'\ncheck = 'lunh'", "lunh"),
        ("[[rules]]\nname = 'x'\npattern = 'a'\ncheck = 'stdnum.nowhere'", "nowhere"),
        ("[[rules]]\nname = 'x'\npattern = 'a'\n[[rules]]\nname = 'x'\npattern = 'b'", "several rules are called x"),
        ("pattern = [", "Invalid value"),
        ("\xff\xfe", ""),
        ("[[rules]]\nname = 'x'\npattern = '(((a{100}){100}){100})'", "x"),
        ("#" * (1 << 20) + "#", "bytes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_a_file_with_a_mistake_changes_nothing_and_says_why(tmp_path: Path, content: str, reason: str) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULE)
    detector = PatternDetector(DetectorOptions(str(rules)))
    detector.refresh()
    rules.write_bytes(content.encode("latin-1"))
    with pytest.raises(RulesError, match=str(rules)) as raised:
        detector.refresh()
    assert reason in str(raised.value)
    assert found(detector, "a cat") == {"animal": 2}
    # It goes on saying so until the file is mended.
    with pytest.raises(RulesError):
        detector.refresh()
    rules.write_text(RULE)
    detector.refresh()


def test_a_missing_file_is_an_error_and_without_any_rules_nothing_is_judged(tmp_path: Path) -> None:
    detector = PatternDetector(DetectorOptions(str(tmp_path / "nowhere.toml")))
    with pytest.raises(RulesError, match="nowhere"):
        detector.refresh()
    with pytest.raises(RulesError, match="no rules are in effect"):
        detector.find("a harmless text")


def test_rules_can_ask_for_the_neighbours_and_make_exceptions() -> None:
    (rule,) = parse_rules(b"[[rules]]\nname = 'n'\npattern = '[0-9]{4}'\nalone = true\nunless = '^0000$'")
    assert rule.first("x1234 12345 0000 ä5678 4321.") == 23
    assert rule.first("nothing") is None


def test_equal_findings_compare_equal() -> None:
    assert ContentFinding(3, "x") == ContentFinding(3, "x")


def test_few_harmless_texts_are_refused(detector: PatternDetector) -> None:
    root = Path(__file__).parents[4]
    paths = [
        path
        for folder in ("common", "deploy", "gateway", "protos", "services")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in SUFFIXES
    ]
    findings = examine(paths, detector)
    assert findings.windows > 500
    assert findings.refused <= 0.02 * findings.windows, findings.rules

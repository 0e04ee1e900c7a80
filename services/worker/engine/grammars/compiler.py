"""Grammars compiled for one vocabulary by XGrammar, and the trial of a compiled grammar before it is used.

XGrammar takes seconds to import, so nothing does before a grammar is asked for.
"""

from __future__ import annotations

import json
import os
import re
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from common.grammars import Grammar, GrammarKind
from common.json_schemas import are_disjoint
from common.models import resolve_model
from common.tokenization import load_text_model
from common.tokenization.vocabulary import read_vocabulary
from services.worker.engine.grammars.matcher import Matcher
from services.worker.engine.grammars.spellings import Spellings

if TYPE_CHECKING:
    from collections.abc import Callable

    import xgrammar
    from tokenizers import Tokenizer

    from common.tokenization.vocabulary import Vocabulary
    from services.worker.engine.grammars.vocabulary_source import VocabularySource

# With other threads of a pass beside it, more would only be in the way.
MAX_THREADS = 4
# More than any model has: no limit of its own is wanted here.
ANY_CONTEXT = 2**31 - 1
# Fields of structural tags that name tokens by id or by text.
TOKEN_FIELDS = ("token", "exclude_tokens", "trigger_tokens")
# When and where in the library's source an error was raised.
_TRACE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")

# Without leap days, and with four digits of a year that every calendar knows.
_DATE = r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,14}[a-zA-Z0-9])?"
_REFERENCE = r"[a-zA-Z0-9._~/?@!$&()*+,;=-]"
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
    "email": rf"^[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}$",
    # Without what JSON would have to escape, nor percent signs.
    "uri": rf"^[a-z][a-z0-9+.-]{{1,15}}:({_REFERENCE}|:)+$",
    "uri-reference": f"^{_REFERENCE}+$",
    "json-pointer": r"^(/[a-zA-Z0-9_.-]*)*$",
    "relative-json-pointer": r"^(0|[1-9]\d{0,3})(#|(/[a-zA-Z0-9_.-]*)*)$",
}
# Values that are no schemas themselves.
_DATA = frozenset({"const", "enum", "default", "examples", "example", "required"})

# So many tokens are drawn at random, starting so many times.
STEPS = 48
STARTS = 3
# CPU time. A mask that takes longer would hold up every row of a pass; those of good grammars take 0.1 ms.
MAX_MASK_S = 0.05
MAX_COMPILED_BYTES = 64 * 1024 * 1024


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message is for its author."""


class Compiler:
    """Compiles grammars for one vocabulary, in any thread. The interpreter's lock is free meanwhile."""

    def __init__(self, source: VocabularySource) -> None:
        """Read the vocabulary.

        Raises:
            ConfigurationError: the model's files cannot be read.
        """
        import xgrammar

        text = load_text_model(
            resolve_model(source.model, weights=False),
            max_context=ANY_CONTEXT,
            placeholder=source.load_format in ("dummy", "fake"),
        )
        self._tokenizer: Tokenizer = text.tokenizer
        self._special_ids = {
            token.content: id_ for id_, token in text.tokenizer.get_added_tokens_decoder().items() if token.special
        }
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "")
        # The bytes of each token.
        self._pieces = _pieces(read_vocabulary(text.tokenizer, source.vocabulary_size), source.vocabulary_size)
        self._tokenizer_info = xgrammar.TokenizerInfo(
            self._pieces,
            vocab_size=source.vocabulary_size,
            stop_token_ids=list(source.eos_token_ids),
        )
        self._grammar_compiler = xgrammar.GrammarCompiler(
            self._tokenizer_info,
            max_threads=min(MAX_THREADS, os.cpu_count() or 1),
            cache_enabled=False,
        )

    @cached_property
    def spellings(self) -> Spellings:
        """Those of the vocabulary."""
        return Spellings(self._pieces)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Return the compiled grammar that matchers are made of; takes from a millisecond to many seconds.

        Raises:
            GrammarError: it is wrong, or needs something that is not supported.
        """
        make: dict[GrammarKind, Callable[[str], xgrammar.CompiledGrammar]] = {
            GrammarKind.JSON_SCHEMA: self._json_schema,
            GrammarKind.REGEX: self._grammar_compiler.compile_regex,
            GrammarKind.EBNF: self._grammar_compiler.compile_grammar,
            GrammarKind.STRUCTURAL_TAG: self._structural_tag,
        }
        try:
            return make[grammar.kind](grammar.text)
        except (RuntimeError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise GrammarError(_reason(error)) from error

    def load(self, data: bytes) -> xgrammar.CompiledGrammar:
        """Return a grammar that another process compiled for the same vocabulary and serialised; takes linear time."""
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._tokenizer_info)

    def _json_schema(self, text: str) -> xgrammar.CompiledGrammar:
        # One way to write white space: a model cannot go on with it for ever, and most of it need not be chosen.
        schema = json.dumps(as_enforced(json.loads(text)))
        return self._grammar_compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=True)

    def _structural_tag(self, text: str) -> xgrammar.CompiledGrammar:
        tag = json.loads(text)
        return self._grammar_compiler.compile_structural_tag(json.dumps(self._prepared(tag)))

    def _prepared(self, value: Any) -> Any:  # Any: JSON
        """Return a structural tag with ids in place of tokens' texts, as special tokens stand for no text here.

        Formats of our own (`common/notations/formats.py`) are replaced by the library's.
        """
        if isinstance(value, list):
            return [self._prepared(item) for item in value]
        if not isinstance(value, dict):
            return value
        match value.get("type"):
            case "marked_string":
                return self._marked_string(value["value"])
            case "text_with_calls":
                return self._text_with_calls(value)
        return {name: self._prepared_field(name, item) for name, item in value.items()}

    def _prepared_field(self, name: str, value: Any) -> Any:  # Any: JSON
        if name == "json_schema":
            return as_enforced(value)
        return self._ids(value) if name in TOKEN_FIELDS else self._prepared(value)

    def _marked_string(self, text: str) -> dict[str, Any]:  # Any: JSON
        """Return the format of `text`, in which special tokens are matched as such."""
        parts = [part for part in self._special.split(text) if part] if self._special.pattern else [text]
        formats = [
            {"type": "token", "token": self._special_ids[part]}
            if part in self._special_ids
            else {"type": "const_string", "value": part}
            for part in parts
        ]
        return formats[0] if len(formats) == 1 else {"type": "sequence", "elements": formats}

    def _text_with_calls(self, value: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        mark, calls = value["mark"], self._prepared(value["content"])
        if mark in self._special_ids:
            excludes = [self._special_ids[token] for token in value["excludes"] if token in self._special_ids]
            rules = [[self._special_ids[mark], calls]]
            return {
                "type": "token_dispatch", "rules": rules, "loop": value["repeats"], "exclude_tokens": excludes,
            }  # fmt: skip
        return {"type": "dispatch", "rules": [[mark, calls]], "loop": value["repeats"], "excludes": value["excludes"]}

    def _ids(self, tokens: Any) -> Any:  # Any: JSON
        if isinstance(tokens, list):
            return [self._ids(token) for token in tokens]
        if not isinstance(tokens, str):
            return tokens
        id_ = self._tokenizer.token_to_id(tokens)
        if id_ is None:
            raise GrammarError(f"the model has no token {tokens[:64]!r}")
        return id_


def _pieces(vocabulary: Vocabulary, size: int) -> list[bytes]:
    """Return the bytes of each token; special ones get bytes that occur in no text, so only their ids allow them."""
    pairs = zip(vocabulary.plain_pieces.data[:size], vocabulary.all_pieces.data[:size], strict=True)
    return [b"\xff%d" % id_ if whole and not plain else plain for id_, (plain, whole) in enumerate(pairs)]


def _reason(error: Exception) -> str:
    """Return the library's error message in one line, without its source location."""
    text = _TRACE.sub("", str(error.args[0] if error.args else error)).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line[:300]


def as_enforced(schema: Any) -> Any:  # Any: JSON
    """Return a schema with patterns in place of formats, and `anyOf` where that means the same as `oneOf`."""
    if isinstance(schema, list):
        return [as_enforced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: value if name in _DATA else as_enforced(value) for name, value in schema.items()}
    if isinstance(result.get("oneOf"), list) and "anyOf" not in result and are_disjoint(result["oneOf"]):
        # The library cannot see that they are disjoint, and warns.
        result["anyOf"] = result.pop("oneOf")
    format_ = result.get("format")
    if isinstance(format_, str) and format_ in PATTERNS:
        del result["format"]
        result["pattern"] = PATTERNS[format_]
        result.setdefault("type", "string")
    return result


def try_out(compiled: xgrammar.CompiledGrammar, vocabulary_size: int) -> None:
    """Follow random paths through a grammar.

    Raises:
        GrammarError: it is too large, has no output, or is too slow to follow.
    """
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        raise GrammarError("it is too large when compiled")
    random = np.random.default_rng(0)
    for _ in range(STARTS):
        matcher = Matcher(compiled, vocabulary_size)
        for step in range(STEPS):
            started = time.thread_time()
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            if allowed.size == 0:
                raise GrammarError("no output conforms to it" if step == 0 else "it leads to where nothing conforms")
            has_ended = not matcher.accept(int(random.choice(allowed))) or matcher.is_terminated
            if time.thread_time() - started > MAX_MASK_S:
                raise GrammarError("it is too ambiguous to follow")
            if has_ended:
                break

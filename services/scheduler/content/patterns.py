"""The shipped detector: regular expressions from a file, with checks for numbers that have a checksum."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from services.scheduler.content.interface import Finding, RulesError
from services.scheduler.content.normal import normalise
from services.scheduler.content.rules import parse_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.content.interface import DetectorOptions
    from services.scheduler.content.rules import Rule

SHIPPED_RULES = Path(__file__).with_name("rules.toml")


class PatternDetector:
    """Applies the rules of a file, which may change during use, to the normalised text.

    RE2 matches in time linear in the text for every pattern, so no rule and no prompt can make it hang; in return
    patterns have neither look-around nor back-references.
    """

    def __init__(self, options: DetectorOptions) -> None:
        """Use the rules named by `options`, or the shipped ones; `refresh` reads them."""
        self._path = Path(options.rules) if options.rules else SHIPPED_RULES
        self._rules: tuple[Rule, ...] = ()
        self._in_effect = ""
        # File status at the last successful read: size, times and inode show whether the file has changed.
        self._seen: tuple[int, ...] = ()

    def find(self, text: str) -> Iterable[Finding]:
        """Return the first finding of each rule.

        Raises:
            RulesError: there are no rules.
        """
        if not self._rules:
            raise RulesError(f"{self._path}: no rules are in effect")
        normal = normalise(text)
        starts = ((rule.first(normal.text), rule.name) for rule in self._rules)
        return [Finding(normal.origin(start), name) for start, name in starts if start is not None]

    def refresh(self) -> str:
        """Read the file again if it has changed; see `Detector`."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if seen == self._seen:
                return self._in_effect
            data = self._path.read_bytes()
            rules = parse_rules(data)
        except (OSError, RulesError) as error:
            # Read again at the next call: a file that is being written may be complete then.
            raise RulesError(f"{self._path}: {error}") from error
        self._seen, self._rules = seen, rules
        self._in_effect = blake2b(data, digest_size=8).hexdigest()
        return self._in_effect

"""Removal of identifying parts from texts: host names, addresses, keys, user names, paths.

Each value becomes a word such as ``HOST1``, the same one everywhere, so that the text stays readable. The
words have no special characters of HTML, JSON or YAML.

All of it takes time in proportion to the text's length: a pattern that begins with a run of characters begins
where the run does, and nowhere within it."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

KINDS: Final[Mapping[str, str]] = {
    "HOST": "host names",
    "ADDRESS": "addresses",
    "KEY": "keys",
    "USER": "user names",
    "PATH": "paths",
    "SERIAL": "serial numbers",
    "WORD": "words of --also",
}
_LEFT_ADDRESSES: Final = frozenset({"127.0.0.1", "0.0.0.0", "255.255.255.255", "::1", "::"})
_PUBLIC: Final = (
    "w3.org",
    "purl.org",
    "matplotlib.org",
    "creativecommons.org",
    "github.com",
    "vllm.ai",
    "semver.org",
)
"""Public domains that pictures, licences and hints mention."""
_ORDINARY: Final = frozenset(
    {"localhost", "root", "user", "users", "home", "host", "none", "unknown", "node"}
)
"""Common names that identify no machine or user."""
_MOST_NAMES: Final = 2000
"""Most names learned from texts; each one is searched for in all texts."""

_SECRET_NAME: Final = (
    r"[\w-]*(?:api[_-]?key|apikey|passwd|password|secret|credentials?|(?:auth|access|refresh|hf|session)[_-]?token|"
    r"access[_-]?key|private[_-]?key|authorization)"
)
_SECRET_KEY: Final = re.compile(rf"{_SECRET_NAME}|-*token", re.IGNORECASE)
_PATTERNS: Final = (
    (
        "KEY",
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
    ),
    ("KEY", re.compile(r"(?P<before>\b(?:Bearer|Basic)\s+)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE)),
    ("KEY", re.compile(r"\b(?:sk|hf|ghp|gho|ghs|glpat|nvapi|xox[abp]|AKIA|ASIA)[-_]?[A-Za-z0-9_-]{16,}")),
    (
        "KEY",
        re.compile(
            rf"(?P<before>(?<![\w-]){_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&]{{3,}})", re.I
        ),
    ),
    (
        "KEY",
        re.compile(
            rf"(?P<before>(?<![\w-])(?=[\w-]*--){_SECRET_NAME}\s+)(?P<value>[^\s\"'-][^\s\"']+)", re.I
        ),
    ),
    ("KEY", re.compile(r"(?P<before>://)(?P<value>[^\s/@:\"']+:[^\s/@\"']+)(?=@)")),
    ("SERIAL", re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}", re.IGNORECASE)),
    ("ADDRESS", re.compile(r"(?P<before>(?<![\w.+-])[.+-]*)(?P<value>\w[\w.+-]*@[\w-]+(?:\.[\w-]+)+)")),
    ("ADDRESS", re.compile(r"(?<![\w:])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)),
    ("ADDRESS", re.compile(r"(?<![\w:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![\w:])", re.IGNORECASE)),
)
_IPV4: Final = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
_IPV6: Final = re.compile(
    r"(?<![\w:])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?:\.\d{1,3}){0,3}(?![\w:])", re.IGNORECASE
)
_URL_HOST: Final = re.compile(
    r"(?P<before>(?<![a-z0-9+.-])[a-z0-9+.-]+://)(?P<value>[a-z0-9.-]+)", re.IGNORECASE
)
_HOME: Final = re.compile(r"/(?:home|Users)/(?P<user>[A-Za-z0-9._-]+)")
# Not behind a letter, a digit, a dot or another slash: those make a URL, a rate or a relative path.
_PATH: Final = re.compile(r"(?<![\w./<~-])(?P<folder>/(?:[\w.@+~-]+/)+)(?P<name>[\w.@+~-]*)")
_LEFT_FOLDERS: Final = ("/v1/", "/v2/", "/proc/", "/sys/", "/dev/", "/api/")
_WINDOWS: Final = re.compile(r"\b[A-Za-z]:\\(?:[^\\\s\"']+\\)+")


class Scrubber:
    """Replaces known or recognised values. ``removed``: kind → value → its word; ``counts``: kind → number of
    replacements. ``hosts`` and ``users``: names known from elsewhere; ``words``: further text to remove."""

    def __init__(
        self, hosts: Iterable[str] = (), users: Iterable[str] = (), words: Iterable[str] = ()
    ) -> None:
        self.removed: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        self.counts: Counter[str] = Counter()
        self._given: set[str] = set()
        self._names: dict[str, str] = {}
        self._known: re.Pattern[str] | None = None
        for kind, names in (("WORD", words), ("HOST", hosts), ("USER", users)):
            for name in names:
                self._learn(kind, name)

    def look(self, text: str) -> None:
        """Learn the hosts of URLs and the users of home folders before any text is scrubbed."""
        for found in _URL_HOST.finditer(text):
            host = found["value"].rstrip(".")
            if not _is_address(host) and not host.endswith(_PUBLIC) and ("." in host or "-" in host):
                self._learn("HOST", host, _MOST_NAMES)
        for found in _HOME.finditer(text):
            self._learn("USER", found["user"], _MOST_NAMES)

    def text(self, text: str) -> str:
        for kind, pattern in _PATTERNS:
            text = pattern.sub(lambda found, kind=kind: self._instead(kind, found), text)  # type: ignore[misc]
        text = _IPV6.sub(self._address, _IPV4.sub(self._address, text))
        text = _URL_HOST.sub(self._url_host, text)
        text = _WINDOWS.sub(lambda found: self._path(found[0], ""), _PATH.sub(self._folder, text))
        if self._names and self._known is None:
            longest = sorted(self._names, key=len, reverse=True)
            words = "|".join(re.escape(word) for word in longest)
            self._known = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])", re.IGNORECASE)
        return self._known.sub(self._name, text) if self._known is not None else text

    def value(self, value: Any, key: str = "", left: frozenset[str] = frozenset()) -> Any:
        """Return a JSON value, scrubbed recursively; keys in ``left`` stay as they are.

        Values of keys such as ``api_key``, or after such an option of a command line, are removed. Versions
        of ``libraries`` are no addresses."""
        if isinstance(value, Mapping):
            return {self._key(name, left): self.value(part, name, left) for name, part in value.items()}
        if isinstance(value, list):
            return [
                self._secret(part)
                if index and _is_secret_option(value[index - 1])
                else self.value(part, key, left)
                for index, part in enumerate(value)
            ]
        if not isinstance(value, str):
            return value
        if _SECRET_KEY.fullmatch(key) and value:
            return self._secret(value)
        return self.text(value)

    def _key(self, name: str, left: frozenset[str]) -> str:
        return name if name in left else self.text(name)

    def _secret(self, value: Any) -> Any:
        return self._word("KEY", value) if isinstance(value, str) and value else value

    def _learn(self, kind: str, name: str, most: int | None = None) -> None:
        name = name.strip()
        # A host is known by its short name, too.
        names = [name, name.split(".")[0]] if kind == "HOST" and not _is_address(name) else [name]
        for form in names:
            if len(form) < 2 or form.lower() in _ORDINARY or form.isdigit() or _is_address(form):
                continue
            if form.lower() not in self._names and (most is None or len(self._names) < most):
                self._names[form.lower()] = kind
                self._known = None

    def _name(self, found: re.Match[str]) -> str:
        return self._word(self._names[found[0].lower()], found[0].lower())

    def _instead(self, kind: str, found: re.Match[str]) -> str:
        parts = found.groupdict()
        value = parts.get("value") or found[0]
        if value in self._given:  # it was taken out already
            return found[0]
        return f"{parts.get('before') or ''}{self._word(kind, value)}"

    def _address(self, found: re.Match[str]) -> str:
        text = found[0]
        if text in _LEFT_ADDRESSES or not _is_address(text):
            return text
        return self._word("ADDRESS", text)

    def _url_host(self, found: re.Match[str]) -> str:
        host = found["value"].rstrip(".")
        if (
            host in self._given
            or host.lower() in _ORDINARY
            or host in _LEFT_ADDRESSES
            or host.endswith(_PUBLIC)
        ):
            return found[0]
        return found["before"] + self._word("HOST", host.lower()) + found["value"][len(host) :]

    def _folder(self, found: re.Match[str]) -> str:
        folder, name = found["folder"], found["name"]
        if folder.startswith(_LEFT_FOLDERS):
            return found[0]
        return self._path(folder, name)

    def _path(self, folder: str, name: str) -> str:
        return f"{self._word('PATH', folder)}/{name}"

    def _word(self, kind: str, value: str) -> str:
        self.counts[kind] += 1
        known = self.removed[kind]
        word = known.setdefault(value, f"{kind}{len(known) + 1}")
        self._given.add(word)
        return word


def _is_secret_option(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("-") and _SECRET_KEY.fullmatch(word) is not None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

"""Chat examples from the documentation inside Python's own standard library.

A question about a function, with its signature; the answer is the first paragraph of its docstring. The
same Python gives the same examples: which ones, how each is asked and which split it falls in come from
hashes of their names.
"""

import hashlib
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = (
    "argparse",
    "ast",
    "base64",
    "bisect",
    "builtins",
    "bz2",
    "calendar",
    "cmath",
    "codecs",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "email.message",
    "email.utils",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "getpass",
    "gettext",
    "glob",
    "graphlib",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "http.client",
    "http.cookies",
    "imaplib",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "keyword",
    "linecache",
    "locale",
    "logging",
    "lzma",
    "mailbox",
    "math",
    "mimetypes",
    "operator",
    "os",
    "os.path",
    "pathlib",
    "pkgutil",
    "platform",
    "plistlib",
    "pprint",
    "queue",
    "quopri",
    "random",
    "re",
    "sched",
    "secrets",
    "select",
    "selectors",
    "shlex",
    "shutil",
    "signal",
    "smtplib",
    "socket",
    "socketserver",
    "sqlite3",
    "ssl",
    "stat",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "symtable",
    "sysconfig",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "unittest",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "xml.dom.minidom",
    "xml.etree.ElementTree",
    "xml.sax.saxutils",
    "zipfile",
    "zlib",
)

QUESTIONS = (
    "What does Python's {call} do?",
    "Explain what {call} does in Python.",
    "In Python, what is {call} for?",
    "How does Python's documentation describe {call}?",
)

SHORTEST_ANSWER, LONGEST_ANSWER = 40, 320
"""Characters; most examples stay under 160 tokens."""

LONGEST_CALL = 110


@dataclass(frozen=True)
class Example:
    name: str
    """Of the function, with its module and class."""
    question: str
    answer: str

    def line(self) -> str:
        messages = [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        ]
        return json.dumps({"messages": messages}, ensure_ascii=False)


def make_examples(train: int, validation: int) -> tuple[list[Example], list[Example]]:
    """So many examples for each split. No function and no answer is in both."""
    chosen = sorted(_distinct(), key=lambda example: _hash(example.name))
    if len(chosen) < train + validation:
        raise ValueError(
            f"train + validation: {train + validation} examples are asked for; this Python's library "
            f"has {len(chosen)}"
        )
    return chosen[validation : validation + train], chosen[:validation]


def write_examples(path: Path, examples: list[Example]) -> None:
    path.write_text("".join(f"{example.line()}\n" for example in examples), encoding="utf-8")


def clean(docstring: str) -> str | None:
    """The first paragraph as prose, or None where it does not read as an answer."""
    paragraphs = [part for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring)) if part.strip()]
    # Functions written in C often begin with their own signature.
    while paragraphs and _is_signature(paragraphs[0]):
        rest = paragraphs[0].partition("\n")[2]
        paragraphs[:1] = [rest] if rest.strip() else []
    if not paragraphs:
        return None
    text = re.sub(r"\s+", " ", paragraphs[0]).strip()
    # ``S.method(...) -> type -- text`` and ``name(...) -> text`` on one line.
    text = re.sub(r"^[\w.]+\([^)]*\)\s*(->\s*[\w.\[\], ]+)?\s*(--|:)\s*", "", text)
    unlike_prose = ">>>" in text or "->" in text or text.endswith(":") or not text[:1].isalpha()
    if unlike_prose or not SHORTEST_ANSWER <= len(text) <= LONGEST_ANSWER:
        return None
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text + "."


def _is_signature(paragraph: str) -> bool:
    first = paragraph.partition("\n")[0].strip()
    return re.fullmatch(r"[\w.]+\(.*\)(\s*->.*)?", first) is not None


def _distinct() -> Iterator[Example]:
    """One example for each documentation: the first by name of those that share it."""
    seen: set[str] = set()
    for name, function in sorted(_functions().items()):
        answer = clean(inspect.getdoc(function) or "")
        call = _call(name, function)
        if answer is None or call is None or answer in seen:
            continue
        seen.add(answer)
        wording = QUESTIONS[_hash(name) // 2**32 % len(QUESTIONS)]
        yield Example(name, wording.format(call=f"`{call}`"), answer)


def _functions() -> dict[str, Any]:
    """Public functions, and public methods of public classes, by dotted name."""
    found: dict[str, Any] = {}
    for module_name in MODULES:
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in _public(_import(module_name)):
            if _lives_elsewhere(value, module_name):
                continue
            if inspect.isclass(value):
                methods = ((key, method) for key, method in _public(value) if inspect.isroutine(method))
                found.update((f"{prefix}{name}.{key}", method) for key, method in methods)
            elif inspect.isroutine(value):
                found[f"{prefix}{name}"] = value
    return found


def _lives_elsewhere(value: Any, module_name: str) -> bool:
    """True of a name that a module only imports from another that is read too."""
    home = getattr(value, "__module__", None)
    return home != module_name and home in MODULES


def _import(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


def _public(owner: Any) -> Iterator[tuple[str, Any]]:
    """What the owner itself defines: a subclass does not repeat its parent's methods."""
    for name, value in sorted(vars(owner).items()):
        if not name.startswith("_"):
            yield name, value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _call(name: str, function: Any) -> str | None:
    """``module.name(parameters)``, or None where it is unknown, too long, or shows an address in memory."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    shown = str(inspect.Signature(plain)).replace("/, ", "").replace(", /)", ")").replace("(/)", "()")
    call = f"{name}{shown}"
    return None if len(call) > LONGEST_CALL or "<" in call else call


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])

"""Which values of the configuration are read while stages run, and by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from omegaconf import DictConfig

from tests.stages import ROOT

_CODE = (f"{ROOT}/src/", f"{ROOT}/data_prep/", f"{ROOT}/train.py", f"{ROOT}/evaluate.py")
_DEEP = 16  # frames between a check and what it reads


@dataclass
class Reads:
    """keys: dotted, of the configuration. fields: (name of the class, field)."""

    keys: set[str] = field(default_factory=set)
    fields: set[tuple[str, str]] = field(default_factory=set)


@contextmanager
def recorded(classes: Iterable[type]) -> Iterator[Reads]:
    """Reads by our code; those that only check a value when it is built do not count."""
    reads = Reads()
    with ExitStack() as stack:
        for name in ("__getattr__", "__getitem__"):
            stack.enter_context(_replaced(DictConfig, name, _reading_keys(name, reads)))
        for one in classes:
            method = _reading_fields(one, reads)
            stack.enter_context(_replaced(one, "__getattribute__", method))
        yield reads


def _reading_keys(name: str, reads: Reads) -> Any:
    original = getattr(DictConfig, name)

    def read(self: DictConfig, key: Any) -> Any:
        value = original(self, key)
        if _is_use(sys._getframe(1)):
            reads.keys.add(str(self._get_full_key(key)))
        return value

    return read


def _reading_fields(one: type, reads: Reads) -> Any:
    original: Any = one.__getattribute__

    def read(self: Any, name: str) -> Any:
        if not name.startswith("_") and _is_use(sys._getframe(1)):
            reads.fields.add((type(self).__name__, name))
        return original(self, name)

    return read


def _is_use(frame: FrameType) -> bool:
    if not frame.f_code.co_filename.startswith(_CODE):
        return False
    above: FrameType | None = frame
    for _ in range(_DEEP):
        if above is None:
            return True
        if above.f_code.co_name == "__post_init__":
            return False
        above = above.f_back
    return True


@contextmanager
def _replaced(owner: type, name: str, method: Any) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

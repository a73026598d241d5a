"""Errors that are the user's to mend: one readable line, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the code is wrong: a file, a key, a value. The message says which."""


class ArtifactError(UserError):
    """An artefact is missing, damaged, or was made for something else."""

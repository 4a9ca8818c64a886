"""Checkpoints that are named by a repo id instead of a folder."""

import dataclasses
import pathlib
import re

from clover_cpp.errors import CheckpointError

REPO_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]  # no pickles: they run code
FOLDERS = ["*/*"]  # not taken: other formats, other people's conversions


@dataclasses.dataclass(frozen=True)
class Repo:
    """A repository of the Hugging Face hub: ORG/NAME, and a branch, tag or commit, or None for the main branch."""

    id: str
    revision: str | None = None

    def __str__(self):
        return f"{self.id}@{self.revision}" if self.revision else self.id

    def folder(self):
        """The folder with its files, fetched if the cache does not have them; HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are respected.

        Raises CheckpointError where the repository cannot be had.
        """
        import huggingface_hub  # takes a while, and most checkpoints are folders
        from huggingface_hub import errors

        known = {
            errors.GatedRepoError: "its owner has to grant access first (see its page), and HF_TOKEN has to be set",
            errors.RevisionNotFoundError: f"it has no revision {self.revision!r}",
            errors.RepositoryNotFoundError: "there is no such repository, or it is private and HF_TOKEN is not set",
            errors.OfflineModeIsEnabled: "it is not in the cache, and HF_HUB_OFFLINE is set",
            errors.LocalEntryNotFoundError: "it is not in the cache, and it cannot be fetched (no network, or HF_HUB_OFFLINE)",
        }
        try:
            found = huggingface_hub.snapshot_download(
                self.id, revision=self.revision, allow_patterns=FILES, ignore_patterns=FOLDERS
            )
        except Exception as error:  # the library's, its HTTP client's, the system's
            reason = next((text for kind, text in known.items() if isinstance(error, kind)), None)
            first = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{self}: no such folder, and as a repository: {reason or f'{type(error).__name__}: {first}'}"
            ) from error
        return pathlib.Path(found)


def parse(text):
    """The `Repo` that a text names (ORG/NAME or ORG/NAME@REVISION), or None."""
    found = REPO_ID.fullmatch(text)
    return Repo(found["id"], found["revision"]) if found else None

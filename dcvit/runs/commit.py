"""Completion of a checkpoint with its checksums, on a disk and in an object store."""

from __future__ import annotations

import shutil

import orbax.checkpoint as ocp
from etils import epath

from dcvit.runs import checksums
from dcvit.runs.steps import TEMPORARY, WRITTEN_LAST


class RenamedFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A temporary folder on a disk, whose checksums are written before it is renamed to its final name."""

    async def finalize(self) -> None:
        """Rename the folder twice: Orbax completes it under another temporary name, and then it gets its checksums."""
        final: epath.Path = self.get_final()
        self._final_path = final.with_name(f"{final.name}{TEMPORARY}-checksums")
        shutil.rmtree(self._final_path, ignore_errors=True)
        await super().finalize()
        checksums.write(self._final_path)
        self._final_path.rename(final)
        self._final_path = final


class CommittedObjects(ocp.path.atomicity.CommitFileTemporaryPath):
    """A folder in an object store, whose checksums are written before the object that marks it as complete."""

    async def finalize(self) -> None:
        """Write the checksums, which do not include the objects that Orbax writes after them."""
        checksums.write(self.get_final(), ignored=WRITTEN_LAST)
        await super().finalize()

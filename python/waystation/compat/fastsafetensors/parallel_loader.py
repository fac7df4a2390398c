"""Loads files one after another, the next while one is handed out: in one process, or in several together.

Of each batch of files every process of the group reads one. Invariants: batches, and the order in which
tensors come, follow from the files' headers and the parameters alone, so that all processes send and receive
the same; no more parts of files are in memory than the queue allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from waystation._errors import InvalidInput
from waystation.compat.fastsafetensors.common import SafeTensorsMetadata, SingleGroup
from waystation.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from waystation.compat.fastsafetensors.loader import SafeTensorsFileLoader
from waystation.compat.fastsafetensors.planning import (
    FileWeight,
    Terms,
    file_budgets,
    parts_in_memory,
    parts_of,
)
from waystation.compat.fastsafetensors.tensors import ProcessGroup

# What each process reads for one batch: a file and the names of its tensors (None: all), or nothing.
Batch: TypeAlias = list[tuple[str, list[str] | None] | None]


class PipelineParallel:
    """Loads files by a loader, batch after batch.

    Args:
        pg: A process group of torch; a `SingleGroup` or None for this process alone.
        loader: What loads.
        hf_weights_files: The files; each process reads every n-th of them.
        max_concurrent_producers: 1.
        queue_size: How many batches wait in memory while one is read and one is handed out; -1 to read the
            next only when one is done with. Less is used if that is what `device_memory_budget` allows.
        use_tqdm_on_load: Taken; no bar is drawn.
        tensor_filter: Load only tensors that a function of their names says yes to; for one process.
        max_batch_bytes: Read files in parts of at most so many bytes.
        use_chunk_budget_as_allocation_size: Taken, and not needed; wants one of the two next to it.
        device_memory_budget: Most bytes that tensors and what is on its way may take, in each process; all
            processes give the same.
        accumulate_resident: Whether tensors stay on the device once they were handed out.
        resident_tensor: Which of them do; by default all.
        broadcast_run_bytes: Most bytes of tensors that are sent together; 0 to send each alone.
        broadcast_run_tensors: Most tensors that are sent together; 0 to send each alone.
        overlap_io: Whether to hand out nothing until a whole batch is read. Taken, and not needed.
        borrowed_tensors: Taken, and not needed: tensors are not copied. For one process, without
            `accumulate_resident`.
        **kwargs: Taken, and not needed.

    Attributes:
        weight_files_batches: What is loaded together.
        queue_size: As it is used.

    Raises:
        ValueError: Parameters do not go together.
        BudgetInfeasibleError: The files cannot be loaded within the budget.
    """

    def __init__(
        self,
        pg: Any,
        loader: SafeTensorsFileLoader,
        hf_weights_files: Sequence[str],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        tensor_filter: Callable[[str], bool] | None = None,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        self.loader = loader
        self.hf_weights_files: list[str] = list(hf_weights_files)
        self.overlap_io = overlap_io
        self.borrowed_tensors = borrowed_tensors
        self._group = ProcessGroup(pg)
        self._run_bytes, self._run_tensors = broadcast_run_bytes, broadcast_run_tensors
        # Tensors that stay should not keep others that were sent with them.
        self._joins = self._group.size() > 1 and resident_tensor is None
        is_alone = self._group.size() == 1 and loader.pg.size() == 1
        is_bounded = max_batch_bytes is not None or device_memory_budget is not None
        refusals = {
            f"max_concurrent_producers must be 1, not {max_concurrent_producers}: batches have one order": (
                max_concurrent_producers != 1
            ),
            "tensor_filter is for one process (pg=None, or all_local=True): the others would wait for "
            "tensors that this one does not read": tensor_filter is not None and not is_alone,
            "use_chunk_budget_as_allocation_size wants max_batch_bytes or device_memory_budget": (
                use_chunk_budget_as_allocation_size and not is_bounded
            ),
            "resident_tensor says what stays, and accumulate_resident=False that nothing does": (
                resident_tensor is not None and not accumulate_resident
            ),
            "borrowed_tensors wants accumulate_resident=False": borrowed_tensors and accumulate_resident,
            "borrowed_tensors is for one process (pg=None, or all_local=True)": (
                borrowed_tensors and not is_alone
            ),
            "broadcast_run_bytes and broadcast_run_tensors are 0 at least": (
                min(broadcast_run_bytes, broadcast_run_tensors) < 0
            ),
        }
        for message, is_refused in refusals.items():
            if is_refused:
                raise InvalidInput(message)
        if tensor_filter is not None:
            loader.set_tensor_filter(tensor_filter)
        self.queue_size: int = queue_size
        terms = Terms(
            budget_bytes=device_memory_budget,
            part_bytes=max_batch_bytes,
            group_size=self._group.size(),
            accumulates=accumulate_resident,
        )
        self.weight_files_batches: list[Batch] = self._batches(terms, resident_tensor)

    # ---- what is loaded together ---------------------------------------------------------------

    def _batches(self, terms: Terms, is_resident: Callable[[str], bool] | None) -> list[Batch]:
        """What is loaded together: a file, or the next part of one, in each process."""
        files, count = self.hf_weights_files, terms.group_size
        rows = [files[start : start + count] for start in range(0, len(files), count)]
        if terms.budget_bytes is None and terms.part_bytes is None:
            return [[(path, None) for path in row] for row in rows]
        keep = self.loader.tensor_filter
        headers = {path: SafeTensorsMetadata.from_file(path, None) for path in dict.fromkeys(files)}
        weights = [FileWeight.of(headers[path], keep, is_resident) for path in files]
        self.queue_size, budgets = file_budgets(weights, self.queue_size, terms)
        budget_of = dict(zip(files, budgets, strict=True))
        batches: list[Batch] = []
        for row in rows:
            parts = [parts_of(headers[path], budget_of[path], keep) for path in row]
            batches += [
                [(path, own[turn]) if turn < len(own) else None for path, own in zip(row, parts, strict=True)]
                for turn in range(max(map(len, parts)))
            ]
        return batches

    # ---- loading -------------------------------------------------------------------------------

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Names and whole tensors, in each process, in the order of the files. Tensors own their memory.

        Close the iterator to stop early: what is still being read is stopped then.
        """
        # The tensor that a group receives is not one of those that are read.
        at_a_time = parts_in_memory(self.queue_size, 1)
        coming = iter(self.weight_files_batches)
        buffers: deque[FilesBufferOnDevice] = deque()
        try:
            while True:
                for batch in coming:
                    buffers.append(self._start(batch))
                    if len(buffers) >= at_a_time:
                        break
                if not buffers:
                    return
                try:
                    yield from self._tensors(buffers[0])
                finally:
                    buffers.popleft().close()
        finally:
            for buffer in buffers:
                buffer.close()

    def _start(self, batch: Batch) -> FilesBufferOnDevice:
        """Begins to read a batch."""
        self.loader.reset()
        given = {rank: own for rank, own in enumerate(batch) if own is not None}
        self.loader.add_filenames({rank: [path] for rank, (path, _) in given.items()})
        is_whole = all(names is None for _, names in given.values())
        parts = None if is_whole else {path: names or [] for path, names in given.values()}
        buffer = self.loader.copy_parts(parts, allow_inflight=True, borrowed_tensors=self.borrowed_tensors)
        self.loader.reset()
        return buffer

    def _tensors(self, buffer: FilesBufferOnDevice) -> Iterator[tuple[str, Any]]:
        names = list(buffer.key_to_rank_lidx)
        most_tensors = self._run_tensors if self._joins and self._run_bytes else 1
        return buffer.iterate_in_runs(names, self._run_bytes, max(1, most_tensors))

    def close(self) -> None:
        """Closes the loader. Idempotent."""
        self.loader.close()


class ParallelLoader(PipelineParallel):
    """Loads files batch after batch, by a loader of its own.

    Args:
        pg: As of `PipelineParallel`, like those that are not named here.
        hf_weights_files: The files.
        max_concurrent_producers: 1.
        queue_size: How many batches wait in memory.
        use_tqdm_on_load: Taken; no bar is drawn.
        device: Where tensors go.
        bbuf_size_kb: Taken, and not needed, like the next ones: the engine decides.
        max_threads: As well.
        nogds: As of `SafeTensorsFileLoader`.
        set_numa: Taken, and not needed.
        debug_log: As well.
        framework: `"pytorch"`, or `"pt"`.
        tensor_filter: Load only tensors that a function of their names says yes to.
        all_local: Have every process read all files by itself, whatever `pg` is.
        use_fgds: Taken, and not needed.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[str],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Callable[[str], bool] | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        group = SingleGroup() if all_local else pg
        super().__init__(
            group,
            SafeTensorsFileLoader(group, device, nogds=nogds, framework=framework),
            hf_weights_files,
            max_concurrent_producers,
            queue_size,
            use_tqdm_on_load,
            tensor_filter=tensor_filter,
            max_batch_bytes=max_batch_bytes,
            use_chunk_budget_as_allocation_size=use_chunk_budget_as_allocation_size,
            device_memory_budget=device_memory_budget,
            accumulate_resident=accumulate_resident,
            resident_tensor=resident_tensor,
            broadcast_run_bytes=broadcast_run_bytes,
            broadcast_run_tensors=broadcast_run_tensors,
            overlap_io=overlap_io,
            borrowed_tensors=borrowed_tensors,
        )

"""Run a model on batches of requests that arrive one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Busy(Exception):
    """There are as many requests as the queue holds."""


class Batcher(Generic[Item, Answer]):
    """Queue of requests, and the one thread that computes their answers in batches.

    The first request of a batch waits for others only while some are being prepared, and at most `wait` seconds. Requests that arrive
    while a batch is computed form the next one.

    Args:
        function: Function from the items of a batch to their answers, in order. An answer that is an exception is raised for its item.
        batch: Largest number of items of a batch.
        wait: Longest time in seconds that the first item of a batch waits for others.
        queue: Largest number of requests that are in work at a time.
        observe: Callback with the size of each batch.
    """

    def __init__(
        self,
        function: Callable[[Sequence[Item]], Sequence[Answer | Exception]],
        *,
        batch: int,
        wait: float,
        queue: int,
        observe: Callable[[int], None],
    ) -> None:
        self.function, self.batch, self.wait, self.limit, self.observe = function, batch, wait, queue, observe
        self.preparing = 0
        self.open = 0
        self._thread = ThreadPoolExecutor(1, "model")
        self._items: asyncio.Queue[tuple[Item, asyncio.Future[Answer]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to compute. Must be called in the event loop of the requests."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop after the batch that is being computed. Requests that are not in it are cancelled."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        while not self._items.empty():
            self._items.get_nowait()[1].cancel()
        self._thread.shutdown(wait=True)

    async def answer(self, prepare: Callable[[], asyncio.Future[Item]]) -> Answer:
        """Prepare an item, and return its answer.

        Args:
            prepare: Function that starts to prepare the item, such as to decode an image in another thread. It is not called if the
                queue is full.

        Raises:
            Busy: The queue is full.
        """
        if self.open >= self.limit:
            raise Busy
        self.open += 1
        try:
            self.preparing += 1
            try:
                item = await prepare()
            finally:
                self.preparing -= 1
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._items.put_nowait((item, future))
            return await future
        finally:
            self.open -= 1

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            if not batch:
                continue
            self.observe(len(batch))
            answers: Sequence[Answer | Exception]
            try:
                answers = await loop.run_in_executor(self._thread, self.function, [item for item, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # the client has gone
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _gather(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Return the next batch, without requests whose clients have gone."""
        batch = [await self._items.get()]
        end = asyncio.get_running_loop().time() + self.wait
        while len(batch) < self.batch:
            left = end - asyncio.get_running_loop().time()
            if self._items.empty() and (not self.preparing or left <= 0):
                break
            try:
                batch.append(await asyncio.wait_for(self._items.get(), max(left, 0.0005)))
            except TimeoutError:
                break
        return [(item, future) for item, future in batch if not future.done()]

"""The connection to TransferQueue: calls that end in time, errors that say what is gone, and connecting anew.

A process has one TransferQueue client of its own, which ``transfer_queue.init`` makes and which stays wired to the
service it was made for. What is here is a second one with the same keys and partitions, which can be replaced.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pystale.integrations.transfer_queue.framework import framework
from pystale.integrations.transfer_queue.rows import Rows, arrays_of, joined, tensors_of

__all__ = ["Service", "TransferQueueGone"]

logger = logging.getLogger("pystale")

T = TypeVar("T")

# TransferQueue waits for its controller without end, and for a storage unit ten minutes. A port that nobody listens at
# any more says sooner that a process is gone.
_PROBE_EVERY_S = 1.0
_PROBE_S = 2.0
# Groups put at the same time share a message up to this size. A large one holds up those that come after it.
_BYTES_TOGETHER = 32 << 20
_CLIENTS = itertools.count()


class TransferQueueGone(ConnectionError):
    """TransferQueue, or a part of it, does not answer. What was asked for has not happened, and may be tried again."""


class _Connection:
    """A client of one service, the ports of its processes, and what identifies it."""

    def __init__(self, client: Any, ports: dict[str, tuple[str, int]]) -> None:
        self.client = client
        self.ports = ports
        self.identity = tuple(sorted(ports))
        self.calls = 0
        self.closing = False

    async def silent(self) -> list[str]:
        """Processes nobody listens for any more."""

        async def refuses(address: tuple[str, int]) -> bool:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*address), _PROBE_S)
            except ConnectionError:
                return True
            except (OSError, asyncio.TimeoutError):
                return False  # busy, or not to be reached that way: the time limit decides
            writer.close()
            return False

        refused = await asyncio.gather(*map(refuses, self.ports.values()))
        return [
            f"{name} at {host}:{port}"
            for (name, (host, port)), gone in zip(self.ports.items(), refused, strict=True)
            if gone
        ]


class Service:
    """TransferQueue, as far as one partition of it is concerned.

    All coroutines run in the event loop of a thread of its own (:meth:`run`, :meth:`start`), since sockets of
    TransferQueue belong to a loop.

    Parameters
    ----------
    partition_id : str
    timeout : float
        Seconds that a call may take, connecting included.
    """

    def __init__(self, partition_id: str, timeout: float) -> None:
        self.partition_id = partition_id
        self.timeout = timeout
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pystale-transferqueue", daemon=True)
        self._thread.start()
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._clearing: asyncio.Task[None] | None = None
        self._closed = False
        self._putting: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Rows, dict[str, Any], asyncio.Future[None]]] = deque()
        self.to_clear: dict[str, None] = {}

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    # The two ways in

    async def run(self, work: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
        """Result of a coroutine that runs in the loop of the service.

        A caller that is cancelled cancels it and waits for its end; `undo` is called, in that loop, with a result that
        came too late.
        """
        self._check_open(work)
        here = asyncio.get_running_loop()
        answer: asyncio.Future[T] = here.create_future()
        running: list[asyncio.Task[T]] = []

        def settle(task: asyncio.Task[T]) -> None:
            if answer.done():  # the caller was cancelled
                return
            if task.cancelled():
                answer.cancel()
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        def unwanted(task: asyncio.Task[T]) -> None:
            if not task.cancelled() and task.exception() is None and undo is not None:
                undo(task.result())

        def deliver(task: asyncio.Task[T]) -> None:
            try:
                here.call_soon_threadsafe(settle, task)
            except RuntimeError:  # that loop is closed
                unwanted(task)

        def start() -> None:
            running.append(self.loop.create_task(work))
            running[0].add_done_callback(deliver)

        async def end() -> None:
            running[0].cancel()
            await asyncio.wait(running)
            unwanted(running[0])

        self.loop.call_soon_threadsafe(start)
        try:
            return await answer
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(end(), self.loop)))
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, blocking."""
        self._check_open(work)
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            work.close()
            raise ValueError("this store is closed; make a new one")

    def close(self) -> None:
        """Disconnect, after what is to be cleared has been, as far as it can be. Blocks."""
        if self._closed:
            return
        with contextlib.suppress(ConnectionError):
            self.wait(self.cleared())
        self.wait(self._disconnect())
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    # Connecting

    async def connected(self) -> tuple[str, ...]:
        """What identifies the service that is there now, connecting where that is necessary.

        Raises
        ------
        TransferQueueGone
            If there is none, or it does not answer.
        """
        return (await self._connected()).identity

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is None:
                connecting = asyncio.ensure_future(asyncio.to_thread(self._connect, time.monotonic() + self.timeout))
                done, _ = await asyncio.wait([connecting], timeout=self.timeout)
                if not done:
                    connecting.add_done_callback(_close_late)
                    raise TransferQueueGone(
                        f"TransferQueue did not let this process connect within {self.timeout} s; {_REMEDY}"
                    )
                self._connection = connecting.result()
            return self._connection

    def _connect(self, deadline: float) -> _Connection:
        ray, queue = framework("ray"), framework("transfer_queue.client")
        if not ray.is_initialized():
            raise TransferQueueGone("this process is in no Ray cluster, where TransferQueue is; call ray.init first")
        try:
            controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:
            raise TransferQueueGone(f"there is no TransferQueue in this Ray cluster; {_REMEDY}") from None
        config = None
        while config is None:
            if time.monotonic() > deadline:
                raise TransferQueueGone(
                    "TransferQueue has a controller, but its storage has not come up: each of its units needs a "
                    "logical CPU of Ray for itself"
                )
            try:
                config = ray.get(controller.get_config.remote(), timeout=max(0.1, deadline - time.monotonic()))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                raise TransferQueueGone(
                    f"the controller of TransferQueue does not answer ({error}); {_REMEDY}"
                ) from None
            if config is None:
                time.sleep(0.2)
        backend = config.backend.storage_backend
        info = config.controller.zmq_info
        client = queue.AsyncTransferQueueClient(f"pystale_{os.getpid()}_{next(_CLIENTS)}", info)
        try:
            client.initialize_storage_manager(backend, config.backend[backend])
        except Exception as error:
            client.close()
            raise TransferQueueGone(f"TransferQueue does not let this process connect ({error}); {_REMEDY}") from None
        ports = {f"the controller {info.id}": (info.ip, info.ports["request_handle_socket"])}
        for unit in (config.backend[backend].get("zmq_info") or {}).values():
            ports[f"the storage unit {unit.id}"] = (unit.ip, unit.ports["put_get_socket"])
        return _Connection(client, ports)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.closing = True
            await self._close_unused(connection)

    async def _close_unused(self, connection: _Connection) -> None:
        if connection.closing and not connection.calls:
            connection.closing = False
            await asyncio.to_thread(connection.client.close)

    async def _call(self, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """Answer of TransferQueue, or the error that says what of it is gone."""
        connection = await self._connected()
        deadline = time.monotonic() + self.timeout
        connection.calls += 1
        task = asyncio.ensure_future(call(connection.client))
        cause: Exception | None = None
        try:
            while True:
                left = deadline - time.monotonic()
                done, _ = await asyncio.wait([task], timeout=max(0.0, min(_PROBE_EVERY_S, left)))
                if done:
                    try:
                        return task.result()
                    except (RuntimeError, OSError) as error:
                        cause, gone = error, await connection.silent()
                        if not gone:  # a process that is killed may take a moment to let go of its port
                            await asyncio.sleep(_PROBE_EVERY_S)
                            gone = await connection.silent()
                        if not gone:
                            raise
                        break
                gone = await connection.silent()
                if gone or time.monotonic() >= deadline:
                    break
            if self._connection is connection:
                self._connection = None
            connection.closing = True
            where = ", ".join(gone) + f" {'is' if len(gone) == 1 else 'are'} gone" if gone else "no answer came in time"
            took = self.timeout + time.monotonic() - deadline
            raise TransferQueueGone(
                f"{what} in partition {self.partition_id!r} failed after {took:.1f} of {self.timeout} s: {where}; "
                + _REMEDY
            ) from cause
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            connection.calls -= 1
            await self._close_unused(connection)

    # Rows

    async def put(self, rows: Rows, tag: dict[str, Any]) -> None:
        """Write rows that are new. What comes while others are written goes with the next message."""
        written: asyncio.Future[None] = self.loop.create_future()
        self._waiting.append((rows, tag, written))
        if self._putting is None:
            self._putting = asyncio.ensure_future(self._put_waiting())
        await written

    async def _put_waiting(self) -> None:
        while self._waiting:
            puts: list[tuple[Rows, dict[str, Any], asyncio.Future[None]]] = []
            nbytes = 0
            while self._waiting and (not puts or nbytes + self._waiting[0][0].nbytes <= _BYTES_TOGETHER):
                put = self._waiting.popleft()
                if not put[2].done():  # its caller has given up
                    puts.append(put)
                    nbytes += put[0].nbytes
            if not puts:
                continue
            error: Exception | None = None
            try:
                rows = joined([put[0] for put in puts])
                await self._put(rows, [tag for some, tag, _ in puts for _ in some.keys])
            except Exception as failed:
                error = failed
            for some, _, written in puts:
                if written.done():
                    self.clear_soon(some.keys)
                elif error is not None:
                    written.set_exception(error)
                else:
                    written.set_result(None)
        self._putting = None

    async def _put(self, rows: Rows, tags: list[dict[str, Any]]) -> None:
        tensors = tensors_of(rows)

        async def call(client: Any) -> None:
            meta = await client.async_kv_retrieve_meta(rows.keys, self.partition_id, create=True)
            meta.update_custom_meta(tags)
            await client.async_put(tensors, meta)

        await self._call(f"putting {len(rows.keys)} rows", call)

    async def update(self, rows: Rows) -> bool:
        """Write columns of rows that are there; False, and nothing is written, where one is not."""
        if not rows.keys:
            return True
        tensors = tensors_of(rows)

        async def call(client: Any) -> bool:
            meta = await client.async_kv_retrieve_meta(rows.keys, self.partition_id)
            if meta.size < len(rows.keys):
                return False
            await client.async_put(tensors, meta)
            return True

        return await self._call(f"writing {len(rows.keys)} masks", call)

    async def get(self, keys: Sequence[str], columns: Sequence[str]) -> dict[str, dict[str, Any]] | None:
        """Rows by key, each an array by column; None where one is not there."""
        if not keys:
            return {}
        queue = framework("transfer_queue")

        async def call(client: Any) -> Any:
            meta = await client.async_kv_retrieve_meta(list(keys), self.partition_id)
            if meta.size < len(keys):
                return None
            meta = meta.select_fields(list(columns))
            if not meta.is_ready or len(meta.field_names) < len(columns):
                return None
            try:
                return await client.async_get_data(meta)
            except queue.StorageKeyNotFoundError:
                return None

        tensors = await self._call(f"getting {len(keys)} rows", call)
        return None if tensors is None else arrays_of(tensors, keys)

    async def keys(self) -> set[str]:
        """All keys of the partition. Costs what there are; not for every day."""
        listed = await self._call("listing the keys", lambda client: client.async_kv_list(self.partition_id))
        return set(listed.get(self.partition_id, ()))

    # Clearing

    def clear_soon(self, keys: Iterable[str]) -> None:
        """Have rows cleared; called in the loop of the service. What fails is tried again with what comes next."""
        self.to_clear.update(dict.fromkeys(keys))
        if self.to_clear and self._clearing is None:
            self._clearing = asyncio.ensure_future(self._clear())
            self._clearing.add_done_callback(self._has_cleared)

    def _has_cleared(self, task: "asyncio.Task[None]") -> None:
        self._clearing = None
        if not task.cancelled() and task.exception() is not None:
            logger.warning("%d rows of TransferQueue are to be cleared still: %s", len(self.to_clear), task.exception())

    async def _clear(self) -> None:
        while self.to_clear:
            keys = list(self.to_clear)

            async def call(client: Any, keys: list[str] = keys) -> None:
                meta = await client.async_kv_retrieve_meta(keys, self.partition_id)
                if meta.size:
                    await client.async_clear_samples(meta)

            await self._call(f"clearing {len(keys)} rows", call)
            for key in keys:
                self.to_clear.pop(key, None)

    async def cleared(self) -> None:
        """Return once what was to be cleared has been."""
        while self.to_clear:
            self.clear_soon(())
            clearing = self._clearing
            if clearing is not None:
                await asyncio.shield(clearing)


def _close_late(connecting: "asyncio.Future[_Connection]") -> None:
    """Close what connected after nobody waited for it any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        threading.Thread(target=connecting.result().client.close, daemon=True).start()


_REMEDY = (
    "start it (again) with transfer_queue.init or pystale.integrations.transfer_queue.start_transfer_queue, after "
    "transfer_queue.close where a part of it is left; the store then connects by itself"
)

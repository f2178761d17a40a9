"""The prefill-to-decode transition: KV moves from head shards on all ranks to one rank, layer by layer (section 7).

After a layer's attention every rank sends the head shard it holds of the requests in transition to their decode ranks,
on the transfer stream, while the next layers run. All transfers of an iteration share one all-to-all per layer, whose
sizes follow from the plan. The first decode of a request waits, per layer, for that layer's arrival.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from conflux_ray.execution.attention import KVPool
from conflux_ray.execution.batch import BlockTable, Segment, gather_slots
from conflux_ray.execution.device import Device, Event
from conflux_ray.execution.exchange import HeadLayout
from conflux_ray.execution.plan import Transfer


@dataclass(slots=True)
class Handoff:
    """The transfers of one iteration on one worker."""

    transfer_ids: list[int]
    number: int  # how many handoffs began before this one
    arriving: set[int]  # allocations whose decode residency is here
    send_blocks: torch.Tensor  # slots in the prefill view, in order of target
    send_offsets: torch.Tensor
    send_sizes: list[int]  # tokens per target rank
    receive_blocks: torch.Tensor  # slots in the decode view
    receive_offsets: torch.Tensor
    arrived: list[Event] = field(default_factory=list)  # per layer

    @property
    def done(self) -> bool:
        """Whether this worker neither reads nor writes blocks for these transfers any more."""
        return self.arrived[-1].query()


class Transitions:
    """Runs handoffs and keeps those not yet acknowledged.

    Args:
        group: a communicator of its own: it is used on another stream than prefill's all-to-all.
    """

    def __init__(
        self, device: Device, pool: KVPool, layout: HeadLayout, rank: int, group: torch.distributed.ProcessGroup
    ) -> None:
        self.device = device
        self.pool = pool
        self.layout = layout
        self.rank = rank
        self.group = group
        self.num_begun = 0
        self._open: list[Handoff] = []
        self._lock = threading.Lock()  # of `_open`: iterations are reported by another thread than enqueues them

    def begin(
        self,
        transfers: Sequence[Transfer],
        prefill_tables: Mapping[int, BlockTable],
        decode_tables: Mapping[int, BlockTable],
    ) -> Handoff | None:
        """Prepare the handoff of an iteration; None if the plan has no transfer."""
        if not transfers:
            return None
        ordered = sorted(transfers, key=lambda t: t.target)
        outgoing = [Segment(t.alloc_id, t.start, t.end) for t in ordered]
        incoming = [Segment(t.alloc_id, t.start, t.end) for t in ordered if t.target == self.rank]
        sizes = [0] * self.layout.sp_degree
        for transfer in ordered:
            sizes[transfer.target] += transfer.end - transfer.start
        send = gather_slots(outgoing, prefill_tables, self.pool.prefill_page)
        receive = gather_slots(incoming, decode_tables, self.pool.block_size)
        handoff = Handoff(
            transfer_ids=[t.transfer_id for t in transfers],
            number=self.num_begun,
            arriving={s.alloc_id for s in incoming},
            send_blocks=self.device.upload(send[0]),
            send_offsets=self.device.upload(send[1]),
            send_sizes=sizes,
            receive_blocks=self.device.upload(receive[0]),
            receive_offsets=self.device.upload(receive[1]),
        )
        self.num_begun += 1
        with self._lock:
            self._open.append(handoff)
        return handoff

    def after_layer(self, handoff: Handoff, layer: int) -> None:
        """Enqueue the transfer of `layer`, whose K and V are written on the main stream by now."""
        stream = self.device.transfer
        stream.wait(self.device.main.record())
        stream.run(lambda: self._move(handoff, layer))
        handoff.arrived.append(stream.record())

    def arrivals(self, alloc_ids: Sequence[int], num_layers: int) -> list[list[Event]]:
        """Per layer, the arrivals that decodes of `alloc_ids` must wait for; empty if there are none."""
        with self._lock:
            known = list(self._open)
        waits = [h for h in known if len(h.arrived) == num_layers and not h.arriving.isdisjoint(alloc_ids)]
        if not waits:
            return []
        return [[h.arrived[layer] for h in waits] for layer in range(num_layers)]

    def acknowledge(self, begun: int, wait: bool) -> list[int]:
        """Transfers of the first `begun` handoffs that are done since the last call; with `wait`, all of those.

        Later handoffs may be under way already: the iteration that is reported knows nothing of them. A failed transfer
        raises here.
        """
        done: list[int] = []
        with self._lock:
            known = [h for h in self._open if h.number < begun]
        for handoff in known:
            if not (wait or handoff.done):
                break
            handoff.arrived[-1].synchronize()
            with self._lock:
                self._open.remove(handoff)
            done += handoff.transfer_ids
        return done

    def _move(self, handoff: Handoff, layer: int) -> None:
        layout = self.layout
        view, local = self.pool.prefill_views[layer], self.pool.layers[layer]
        send = self.device.gather_kv(view, handoff.send_blocks, handoff.send_offsets)
        own = handoff.send_sizes[self.rank]
        received = send.new_empty(layout.sp_degree * own, *send.shape[1:])
        self.device.all_to_all(received, send, [own] * layout.sp_degree, handoff.send_sizes, self.group)
        if own:
            self.device.scatter_kv(local, handoff.receive_blocks, handoff.receive_offsets, received)

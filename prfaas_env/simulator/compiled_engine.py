"""The compiled engine: the same world as the SimPy engine, as arrays and one compiled event loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas_env.decision import Decision
from prfaas_env.simulator import kernel
from prfaas_env.simulator import layout as L
from prfaas_env.simulator.formulas import NEVER_NS, FloatArray, IntArray
from prfaas_env.simulator.jit import compile_functions
from prfaas_env.simulator.layout import RECORD_COLUMNS, Layout, Sizes, initial_sizes
from prfaas_env.simulator.prefix_pool import start_pools
from prfaas_env.simulator.records import RequestRecords, Totals
from prfaas_env.simulator.world import World
from prfaas_env.telemetry import RECENT_LENGTHS, Telemetry, encode_values

#: Z, F, P and C of one env.
State = tuple[IntArray, FloatArray, IntArray, IntArray]

_LOCK = threading.Lock()
#: Rare on the way of a request, so they stay calls: smaller code, quicker to compile.
_OUT_OF_LINE = frozenset(
    {
        "roll_windows",
        "settle_all",
        "open_flow",
        "production_ends",
        "evict",
        "fault_event",
        "next_abort",
        "open_when_ready",
        "retransmitted",
        "order_conversion",
        "conversion_event",
        "begin_switch",
        "best_link",
        "capacity_changes",
        "predict_s",
        "start_attempt",
        "link_advance",
        "read_site",
        "read_pool",
        "read_link",
        "cached_blocks",
        "pin_prefix",
        "unpin_prefix",
        "store_prefix",
        "hold",
        "claim_prefix",
        "copy_first",
        "copy_arrives",
        "seen_prefix",
    }
)
_ENTRIES = (
    kernel.run,
    kernel.begin,
    kernel.apply_decision,
    kernel.read_telemetry,
    kernel.read_totals,
    kernel.step_many,
    encode_values,
)


@lru_cache(maxsize=1)
def compiled_kernel() -> dict[str, Callable[..., Any]]:
    """The compiled kernel; its first call in a process says so once if something has to be compiled."""
    with _LOCK:
        return compile_functions(_ENTRIES, _OUT_OF_LINE, _say_compiling)


def _say_compiling() -> None:
    sys.stderr.write("compiling the simulator (once)\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class CompiledSnapshot:
    """Whole state of a compiled engine: its arrays, copied. The workload inside is that of `world`."""

    world: World
    sizes: Sizes
    ints: IntArray
    reals: FloatArray
    requests: IntArray
    caches: IntArray


class StateView(NamedTuple):
    """A running state as it lies in memory: not copied, so it changes with its engine; not to be written to.

    `first_open` is the first request that is neither resolved nor still to come (all before it are resolved).
    """

    world: World
    layout: Layout
    ints: IntArray
    reals: FloatArray
    requests: IntArray
    caches: IntArray
    first_open: int

    @property
    def now_ns(self) -> int:
        """Present instant."""
        return int(self.ints[L.NOW])


class CompiledEngine:
    """One episode of one world; see `engine.Engine`."""

    name = "compiled"

    def __init__(self, world: World) -> None:
        self.world = world
        self._functions = compiled_kernel()
        changes = max((len(trace.time_ns) for trace in world.links), default=0)
        sizes = replace(initial_sizes(world.scenario, changes), faults=len(world.faults))
        self._use(Layout(world.scenario, sizes))
        self._ints, self._reals = self._layout.start()
        load_world(world, self._layout, self._ints, self._reals)
        self._requests = request_rows(world)
        self._caches = start_pools(world)
        self._conversion_ns = int(self._ints[L.CONVERSION_NS])
        self._first_open = 0
        self._functions["begin"](self._ints, self._requests)

    def _use(self, layout: Layout) -> None:
        self._layout = layout
        self._n_fields = len(self.world.schema)
        self._whole = np.zeros(kernel.N_ALL_TOTALS, dtype=np.int64)
        self._real = np.zeros(2 * layout.n_link)
        self._legal = np.zeros(3 * layout.n_pd, dtype=np.int64)

    # ------------------------------------------------------------------ stepping

    @property
    def now_ns(self) -> int:
        """Present instant."""
        return int(self._ints[L.NOW])

    @property
    def done(self) -> bool:
        """Whether every request is resolved."""
        return bool(self._ints[L.UNRESOLVED] == 0)

    def apply(self, decision: Decision) -> None:
        """Put a decision in force; an order that is not legal becomes "no move" and is counted."""
        if len(decision.clusters) != self._layout.n_pd:
            raise ValueError(
                f"decision for {len(decision.clusters)} PD clusters, there are {self._layout.n_pd}"
            )
        if self._ints[L.HEAP_N] + self._layout.n_pd > self._ints[L.HEAP_CAP]:
            self._grow(kernel.GROW_HEAP)
        for pd, cluster in enumerate(decision.clusters):
            by_margin = cluster.threshold_tokens is None
            value = cluster.margin_s if by_margin else cluster.threshold_tokens
            self._functions["apply_decision"](
                self._ints,
                self._reals,
                pd,
                int(by_margin),
                float(value if value is not None else 0.0),
                int(cluster.move),
                int(cluster.cache_rule == "abundant"),
            )

    def run_until(self, t_ns: int) -> None:
        """Handle everything that lies before `t_ns`; what lies at it follows the next decision."""
        if t_ns > self.now_ns:
            self._run(t_ns, False)

    def run_to_end(self, limit_ns: int = NEVER_NS) -> None:
        """Run to the end of the instant in which the last request is resolved, or to `limit_ns`."""
        self._run(limit_ns, True)

    def _run(self, until_ns: int, to_end: bool) -> None:
        while True:
            status = self._functions["run"](
                self._ints, self._reals, self._caches, self._requests, until_ns, to_end
            )
            if status == kernel.RAN:
                return
            self._grow(status)

    def _grow(self, status: int) -> None:
        """Double the array that is too small."""
        self.make_room(bigger(self._layout.sizes, status))

    def make_room(self, sizes: Sizes) -> None:
        """Have arrays of these capacities, none below the present one; offsets move, everything else stays."""
        if sizes == self._layout.sizes:
            return
        new = Layout(self.world.scenario, sizes)
        self._ints, self._reals = moved(self._layout, new, self._ints, self._reals)
        self._use(new)

    # ------------------------------------------------------------------ readings

    @property
    def records(self) -> RequestRecords:
        """Per-request results so far (copies)."""
        return RequestRecords(
            **{
                name: self._requests[: len(self.world.requests), column].copy()
                for name, column in RECORD_COLUMNS.items()
            }
        )

    def totals(self) -> Totals:
        """Cumulative figures now."""
        self._functions["read_totals"](self._ints, self._reals, self._caches, self._whole, self._real)
        return totals_of(self._whole.tolist(), self._real.tolist(), self._layout.n_link)

    def telemetry(self) -> Telemetry:
        """What a scheduler can see now."""
        ints = self._ints
        values = np.empty(self._n_fields)
        self._functions["read_telemetry"](ints, self._reals, self._requests, values, self._legal)
        now = int(ints[L.NOW])
        return Telemetry(
            self.world.schema,
            now,
            values,
            conversion_tick=now > 0 and now % self._conversion_ns == 0,
            legal_moves=self._legal_tuples(),
            recent_lengths_tokens=tuple(recent_lengths(ints, pd) for pd in range(self._layout.n_pd)),
        )

    def encode(self, telemetry: Telemetry) -> tuple[NDArray[np.float32], int]:
        """`TelemetrySchema.encode`, compiled."""
        out = np.empty(self._n_fields, dtype=np.float32)
        return out, self._functions["encode_values"](telemetry.values, *telemetry.schema.scales, out)

    def _legal_tuples(self) -> tuple[tuple[bool, bool, bool], ...]:
        flags = self._legal.tolist()
        return tuple(
            (bool(flags[k]), bool(flags[k + 1]), bool(flags[k + 2])) for k in range(0, len(flags), 3)
        )

    def legal(self) -> tuple[tuple[bool, bool, bool], ...]:
        """Legal moves per PD cluster now."""
        return self.telemetry().legal_moves

    # ------------------------------------------------------------------ snapshots

    def snapshot(self, into: CompiledSnapshot | None = None) -> CompiledSnapshot:
        """Copy the whole state.

        Args:
            into: an earlier snapshot that is no longer needed; its memory is used again where it fits, which
                spares planners that branch at every decision most of the cost.
        """
        if into is None or into.world is not self.world or into.sizes != self._layout.sizes:
            ints, reals, requests, caches = self._state()
            return CompiledSnapshot(
                self.world, self._layout.sizes, ints.copy(), reals.copy(), requests.copy(), caches.copy()
            )
        _copy_state(self._state(), (into.ints, into.reals, into.requests, into.caches))
        return into

    def view(self) -> StateView:
        """The running state, for branches (see `prfaas_env.branches`)."""
        self._first_open = first_open(self._ints, self._requests, self._first_open)
        return StateView(self.world, self._layout, *self._state(), self._first_open)

    def _state(self) -> State:
        return self._ints, self._reals, self._requests, self._caches

    def restore(self, snapshot: CompiledSnapshot) -> None:
        """Return to a snapshot; the snapshot stays as it is."""
        self._first_open = 0
        if snapshot.world is self.world and snapshot.sizes == self._layout.sizes:
            _copy_state((snapshot.ints, snapshot.reals, snapshot.requests, snapshot.caches), self._state())
            return
        self.world = snapshot.world
        self._use(Layout(snapshot.world.scenario, snapshot.sizes))
        self._ints, self._reals = snapshot.ints.copy(), snapshot.reals.copy()
        self._requests, self._caches = snapshot.requests.copy(), snapshot.caches.copy()


def totals_of(whole: list[Any], real: list[Any], n_links: int) -> Totals:
    """`Totals` from what `kernel.read_totals` writes (N_ALL_TOTALS and 2 n_links values, or rows of them)."""
    split = kernel.N_WHOLE_TOTALS
    prefix = split + kernel.N_REASONS
    return Totals._make(
        (
            *whole[:split],
            tuple(real[:n_links]),
            tuple(real[n_links:]),
            tuple(whole[split:prefix]),
            tuple(whole[prefix:]),
        )
    )


def _copy_state(source: State, target: State) -> None:
    """Overwrite one state of a world with another. Requests that have arrived in neither are the same in both."""
    touched = max(int(source[0][L.NEXT_ARRIVAL]), int(target[0][L.NEXT_ARRIVAL]))
    target[0][:], target[1][:] = source[0], source[1]
    target[2][:touched] = source[2][:touched]
    target[3][:] = source[3]


def first_open(ints: IntArray, requests: IntArray, known: int = 0) -> int:
    """The first request that has arrived and is not resolved, or else the next arrival; none before `known` is."""
    arrived = int(ints[L.NEXT_ARRIVAL])
    status = requests[known:arrived, L.P_STATUS]
    at = int((status == kernel.OPEN).argmax()) if len(status) else 0
    return known + at if len(status) and status[at] == kernel.OPEN else arrived


def bigger(sizes: Sizes, status: int) -> Sizes:
    """Twice the room in the array that the kernel found too small."""
    if status == kernel.GROW_HEAP:
        return replace(sizes, heap=2 * sizes.heap)
    return replace(sizes, flows=2 * sizes.flows)


def recent_lengths(ints: IntArray, pd: int) -> IntArray:
    """The last incremental lengths at the door of a PD cluster, oldest first."""
    site = int(ints[L.O_PD]) + pd * L.W_PD
    n, at = int(ints[site + L.D_RECENT_N]), int(ints[site + L.D_RECENT_AT])
    base = int(ints[L.O_RECENT]) + pd * RECENT_LENGTHS
    ring = ints[base : base + RECENT_LENGTHS]
    return ring[:n].copy() if n < RECENT_LENGTHS else np.concatenate((ring[at:], ring[:at]))


def blank_rows(n: int) -> IntArray:
    """Rows of P of n requests that have not arrived, without their workload."""
    rows = np.zeros((n, L.W_P), dtype=np.int64)
    rows[:, L.P_PREFILL_START : L.P_ABORT + 1] = NEVER_NS
    rows[:, L.P_PRFAAS] = -1
    return rows


def request_rows(world: World) -> IntArray:
    """P of a world before the start: the workload and empty records; one row more, so that it is never empty."""
    table = world.requests
    n = len(table)
    rows = blank_rows(n + 1)
    rows[:n, L.P_ARRIVAL] = table.arrival_ns
    rows[:n, L.P_INPUT] = table.input_tokens
    rows[:n, L.P_OUTPUT] = table.output_tokens
    rows[:n, L.P_PD] = world.pd_of
    rows[:n, L.P_HAD] = table.cached_tokens
    if world.give_up_ns is not None:
        rows[:n, L.P_GIVE_UP] = world.give_up_ns
        rows[:n, L.P_GIVE_UP_WHO] = np.lexsort((np.arange(n), world.pd_of, world.give_up_ns))
    if world.jitter_ns is not None:
        rows[:n, L.P_LUCK] = world.jitter_ns
    return rows


def load_world(world: World, layout: Layout, ints: IntArray, reals: FloatArray) -> None:
    """Write what a world has beside its requests into the arrays: capacity traces, faults, counts."""
    n = len(world.requests)
    ints[L.N_REQUESTS] = ints[L.UNRESOLVED] = n
    ints[L.NEXT_GIVE_UP] = n if world.give_up_ns is None else 0
    ints[L.NEXT_DEADLINE] = n if ints[L.DEADLINE_NS] == NEVER_NS else 0
    faults = world.faults
    ints[L.N_FAULTS] = len(faults)
    at = layout.offsets[L.O_FAULT]
    block = ints[at : at + len(faults) * L.W_FAULT].reshape(-1, L.W_FAULT)
    block[:, L.E_TIME], block[:, L.E_CLUSTER] = faults.time_ns, faults.cluster
    block[:, L.E_INSTANCE] = faults.instance
    at = layout.offsets[L.OF_FAULT]
    reals[at : at + len(faults)] = faults.speed
    changes = layout.sizes.changes
    for k, trace in enumerate(world.links):
        n = len(trace.time_ns)
        at = layout.offsets[L.O_CAPACITY] + k * changes
        ints[at : at + n] = trace.time_ns
        at = layout.offsets[L.OF_CAPACITY] + k * changes
        reals[at : at + n] = trace.capacity_bps
        ints[layout.offsets[L.O_LINK] + k * L.W_LINK + L.K_CAP_N] = n
        reals[layout.offsets[L.OF_LINK] + k * L.WF_LINK + L.KF_CAPACITY] = trace.capacity_bps[0]


def moved(old: Layout, new: Layout, ints: IntArray, reals: FloatArray) -> tuple[IntArray, FloatArray]:
    """The state in the arrays of a layout with larger capacities."""
    out_ints, out_reals = new.start()
    kept = np.arange(L.N_SCALARS)
    fixed = [*new.offsets, L.HEAP_CAP, L.HEAP_ROOM, L.FLOW_CAP, L.CAP_CAP]
    kept = kept[~np.isin(kept, fixed)]
    out_ints[kept] = ints[kept]
    for q, (start, _, _) in enumerate(old.trees):
        # trees move as a whole; their offsets in the pool and site blocks are restored below
        size = new.trees[q][1] - new.trees[q][0]
        out_ints[new.trees[q][0] : new.trees[q][0] + 3 * size] = ints[start : start + 3 * size]
    for name in old.offsets:
        real = name in L.REAL_BLOCKS
        source, target = (reals, out_reals) if real else (ints, out_ints)
        sizes_old, sizes_new = old.block_sizes[name], new.block_sizes[name]
        # blocks of arrays that grow: per link, and for flows per field
        fields = {L.O_FLOW: L.W_FLOW, L.OF_FLOW: L.WF_FLOW, L.O_CAPACITY: 1, L.OF_CAPACITY: 1}
        parts = old.n_link * fields[name] if name in fields else 1
        if parts == 0:
            continue
        a, b = sizes_old // parts, sizes_new // parts
        for part in range(parts):
            x, y = old.offsets[name] + part * a, new.offsets[name] + part * b
            target[y : y + min(a, b)] = source[x : x + min(a, b)]
    for q in range(old.n_prfaas + old.n_pd):
        base = new.offsets[L.O_POOL] + q * L.W_POOL
        out_ints[base + L.Q_IDLE_TREE], out_ints[base + L.Q_FREE_TREE], decode_tree = new.trees[q]
        out_ints[base + L.Q_PROFILE] = new.profile_at[q]
        if q >= old.n_prfaas:
            out_ints[new.offsets[L.O_PD] + (q - old.n_prfaas) * L.W_PD + L.D_TREE] = decode_tree
    return out_ints, out_reals

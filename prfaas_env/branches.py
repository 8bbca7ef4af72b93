"""Branches: copies of a running state that are stepped on together, each with decisions of its own.

What planners and labels by roll-outs need. A `CompiledSnapshot` copies a whole episode; a branch copies what lies
between the first unresolved request and the end of its look ahead, which is little and does not grow with the episode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray

from prfaas_env.outlook import Outlook, rewrite
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator import kernel, prefix_pool
from prfaas_env.simulator import layout as L
from prfaas_env.simulator.compiled_engine import CompiledEngine, StateView
from prfaas_env.simulator.formulas import FloatArray, IntArray
from prfaas_env.simulator.layout import RECORD_COLUMNS, Sizes
from prfaas_env.simulator.records import RequestRecords, Totals
from prfaas_env.simulator.world import World
from prfaas_env.telemetry import Telemetry
from prfaas_env.vector import Batch, BoolArray

#: Places in the whole totals of `kernel.read_totals`, which are in the order of `Totals`.
WHOLE_REJECTED, WHOLE_ABORTED, WHOLE_WAITING_NS = (
    Totals._fields.index(name) for name in ("rejected", "aborted", "waiting_ns")
)
#: Columns that giving up reads of requests far from the present one: their order is over the whole episode.
_GIVE_UP_COLUMNS = (L.P_STATUS, L.P_GIVE_UP, L.P_GIVE_UP_WHO)


class Branches:
    """n states of worlds of one scenario that can be set to the present state of others and stepped on.

    Set states with `take` or `take_env`, then `step` them. The results of a step stand in `observation`, `values`,
    `legal`, `waiting_ns` and `lost_requests`, one row per branch; they are valid for branches stepped or read at least
    once since they were set. A branch does exactly what its source would do under the same decisions.

    Args:
        scenario: the scenario of all sources.
        n: number of branches.
        threads: True: many branches are stepped in two threads.
    """

    def __init__(self, scenario: Scenario, n: int, threads: bool = False) -> None:
        self.n = n
        self._batch = Batch(scenario, n, threads)
        self._rows = np.zeros((n, 2), dtype=np.int64)
        self._limit_ns = np.zeros(n, dtype=np.int64)
        self._all = np.ones(n, dtype=np.bool_)

    def close(self) -> None:
        """End the threads."""
        self._batch.close()

    # ------------------------------------------------------------------ setting

    def take(self, engine: CompiledEngine, slots: slice, until_ns: int) -> None:
        """Set branches to the present state of an engine.

        Args:
            engine: the source; it goes on undisturbed (its arrays may grow, which changes no result).
            slots: which branches.
            until_ns: the last instant that these branches will be stepped to; what arrives later is not copied.

        Raises:
            ValueError: the engine is of another scenario.
        """
        self._same_scenario(engine.world)
        self._take(engine.view, engine.make_room, slots, until_ns)

    def take_env(self, batch: Batch, e: int, slots: slice, until_ns: int) -> None:
        """Set branches to the present state of env `e` of a batch; otherwise as `take`."""
        world = batch.worlds[e]
        if world is None:
            raise ValueError(f"env {e} has no world yet")
        self._same_scenario(world)
        self._take(lambda: batch.view(e), batch.make_room, slots, until_ns)

    def fork(self, k: int, slots: slice) -> None:
        """Set branches to the present state of branch `k`, which is none of them."""
        if k in range(*slots.indices(self.n)):
            raise ValueError(f"branch {k} cannot be set to itself")
        first, last = self._rows[k].tolist()
        self._put(self.view(k), first, last, slots, int(self._limit_ns[k]))

    def redraw(self, k: int, outlook: Outlook, until_ns: int) -> None:
        """Let a branch that was set expect an outlook in the place of what its world holds; see `outlook.rewrite`.

        Args:
            k: the branch.
            outlook: what it is to expect.
            until_ns: the last instant that it will be stepped to.

        Raises:
            ValueError: its world has prefix pools, which know the prompts of their world only.
        """
        batch = self._batch
        if batch.caches[k, prefix_pool.ON]:
            raise ValueError("a branch with prefix pools cannot expect other requests than its world holds")
        last = int(batch.ints[k, L.NEXT_ARRIVAL]) + len(outlook.output_tokens)
        batch.make_rows(last + 1, 1)
        sizes = batch.layout.sizes
        if batch.ints[k, L.HEAP_N] + batch.layout.n_inst + batch.layout.n_link > sizes.heap:
            batch.make_room(replace(sizes, heap=2 * sizes.heap))
        rewrite(self.view(k), outlook)
        self._rows[k, 1] = last
        self._limit_ns[k] = until_ns

    def view(self, k: int) -> StateView:
        """The state of a branch as it lies in memory; all requests before its `first_open` are resolved."""
        batch, world = self._batch, self._batch.worlds[k]
        if world is None:
            raise ValueError(f"branch {k} has not been set")
        state = (batch.ints[k], batch.reals[k], batch.requests[k], batch.caches[k])
        return StateView(world, batch.layout, *state, int(self._rows[k, 0]))

    def fits(self, scenario: Scenario) -> bool:
        """Whether sources may be of this scenario."""
        return scenario is self._batch.scenario or scenario == self._batch.scenario

    def _same_scenario(self, world: World) -> None:
        if not self.fits(world.scenario):
            mine = self._batch.scenario.name
            raise ValueError(f"branches are of scenario {mine}, the source is of {world.scenario.name}")

    def _take(
        self,
        view: Callable[[], StateView],
        make_room: Callable[[Sizes], None],
        slots: slice,
        until_ns: int,
    ) -> None:
        state = view()
        mine, theirs = self._batch.layout.sizes, state.layout.sizes
        if mine != theirs:
            pairs = zip(astuple(mine), astuple(theirs), strict=True)
            sizes = Sizes(*(max(pair) for pair in pairs))
            make_room(sizes)
            self._batch.make_room(sizes)
            state = view()
        arrival_ns = state.world.requests.arrival_ns
        n = len(arrival_ns)
        arrived = int(state.ints[L.NEXT_ARRIVAL])
        # one row behind the last arrival that a branch handles: its time is looked at
        last = min(arrived + int(np.searchsorted(arrival_ns[arrived:], until_ns)) + 1, n)
        # the deadline that comes next may be of a request that is over
        first = min(state.first_open, int(state.ints[L.NEXT_DEADLINE]))
        self._put(state, first, last, slots, until_ns)

    def _put(self, state: StateView, first: int, last: int, slots: slice, limit_ns: int) -> None:
        batch, world = self._batch, state.world
        gives_up = world.give_up_ns is not None
        n = len(world.requests)
        rows_needed = n + 1 if gives_up else max(last, min(last + last // 2 + 1024, n + 1))
        batch.make_rows(rows_needed, len(state.caches))
        requests = batch.requests
        # late events of requests that are over may come: no row of an earlier use may look open
        rows = self._rows[slots]
        requests[slots, rows[:, 0].min() : rows[:, 1].max(), L.P_STATUS] = kernel.FINISHED
        requests[slots, first:last] = state.requests[first:last]
        if gives_up:
            for column in _GIVE_UP_COLUMNS:
                requests[slots, :n, column] = state.requests[:n, column]
        batch.ints[slots] = state.ints
        batch.reals[slots] = state.reals
        batch.caches[slots, : len(state.caches)] = state.caches
        for k in range(*slots.indices(self.n)):
            batch.worlds[k] = world
        self._rows[slots] = first, last
        self._limit_ns[slots] = limit_ns

    # ------------------------------------------------------------------ stepping

    def step(
        self,
        until_ns: int | IntArray,
        value: FloatArray,
        move: IntArray,
        *,
        by_margin: bool = True,
        abundant: IntArray | None = None,
        live: BoolArray | None = None,
    ) -> None:
        """Put decisions in force and run on.

        Args:
            until_ns: instant to run to, one for all or shape (n,).
            value: margins in s or thresholds in tokens, shape (n, PD clusters).
            move: values of `Move`, shape (n, PD clusters); one that is not legal becomes none.
            by_margin: what `value` holds.
            abundant: 1 where the cache rule is the abundant one, shape (n, PD clusters); default scarce.
            live: branches to step, shape (n,); default all.

        Raises:
            ValueError: a branch would be stepped past the instant that it was set for.
        """
        until = np.broadcast_to(np.asarray(until_ns, dtype=np.int64), (self.n,))
        live = self._all if live is None else live
        past = live & (until > self._limit_ns)
        if past.any():
            k = int(past.argmax())
            raise ValueError(
                f"branch {k} was set for steps to {self._limit_ns[k] / 1e9:g} s, not {until[k] / 1e9:g} s"
            )
        task = np.where(live, kernel.DECIDE, kernel.SKIP)
        self._batch.step(task, until, by_margin, value, move, abundant)

    def read(self, live: BoolArray | None = None) -> None:
        """Fill in the results of branches that were set and not yet stepped."""
        task = np.where(self._all if live is None else live, kernel.READ, kernel.SKIP)
        nothing = np.zeros((self.n, self._batch.layout.n_pd))
        self._batch.step(task, self._limit_ns, True, nothing, nothing.astype(np.int64))

    # ------------------------------------------------------------------ results

    @property
    def n_pd(self) -> int:
        """Number of PD clusters."""
        return self._batch.layout.n_pd

    @property
    def now_ns(self) -> IntArray:
        """Present instants, shape (n,)."""
        return self._batch.ints[:, L.NOW].copy()

    @property
    def observation(self) -> NDArray[np.float32]:
        """Encoded readings, shape (n, fields); changed by the next step."""
        return self._batch.observation

    @property
    def values(self) -> FloatArray:
        """Readings in physical units, shape (n, fields) in schema order; changed by the next step."""
        return self._batch.values

    @property
    def legal(self) -> BoolArray:
        """Legal moves, shape (n, PD clusters, 3) in the order of `Move`."""
        legal: BoolArray = self._batch.legal.reshape(self.n, -1, 3) != 0
        return legal

    @property
    def waiting_ns(self) -> IntArray:
        """Integral of the number of requests that wait for their first token, since the start of the episode, (n,)."""
        return self._batch.whole[:, WHOLE_WAITING_NS].copy()

    @property
    def lost_requests(self) -> IntArray:
        """Requests rejected and aborted since the start of the episode, shape (n,)."""
        return self._batch.whole[:, WHOLE_REJECTED] + self._batch.whole[:, WHOLE_ABORTED]

    def totals_of(self, k: int) -> Totals:
        """Cumulative figures of a branch, those of its source before it was set included."""
        return self._batch.totals_of(k)

    def telemetry_of(self, k: int) -> Telemetry:
        """The reading of a branch."""
        return self._batch.telemetry_of(k)

    def records_of(self, k: int) -> tuple[int, RequestRecords]:
        """(number of the first one, records of it and all that have arrived after it) of a branch.

        The first one is at latest the first request that was open when the branch was set.
        """
        first = int(self._rows[k, 0])
        rows = self._batch.requests[k, first : int(self._batch.ints[k, L.NEXT_ARRIVAL])]
        return first, RequestRecords(**{name: rows[:, c].copy() for name, c in RECORD_COLUMNS.items()})

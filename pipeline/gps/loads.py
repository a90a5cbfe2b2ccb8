"""What a transfer costs whom, and the least that any plan for it must cost.

Three kinds of loads accumulate, in seconds: what a holder gives (at the rate of the link that it takes), what a node's
network carries out and in, and what a receiver takes. The last does not depend on who gives.

Shape suffixes: D demands, H holders, N nodes, L loads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.gps.layout import Box

_ROUNDS = 60
_UNLIKELY = -7.0
"""Logarithm of the first weight of a network beside that of a holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of a copy: `latency_s` and bytes per second. `local`: from a node's memory to a receiver on it; `network`: to
    one elsewhere; a node gives over `lanes` such links at once. `nic`: what a node's cards carry each way, with eight
    of 800 Gbit/s. Where they carry less, plans keep them from filling up, and are less even over holders."""

    latency_s: float = 20e-6
    local: float = 40e9
    network: float = 20e9
    lanes: int = 8
    nic: float = 800e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where both sides are: the node of each rank that holds, and of each rank of each replica that receives."""

    sources: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Demand:
    """The same slice of all `names`, for one receiver; `size_bytes` is of one of them."""

    names: tuple[str, ...]
    box: Box
    size_bytes: int
    holders: tuple[int, ...]
    replica: int
    rank: int
    node: int


class Loads:
    """Accumulated seconds: of each holder what it gives, of each node what its network carries out and in."""

    def __init__(self, ends: Ends, rates: Rates) -> None:
        num_nodes = 1 + max((*ends.sources, *(node for nodes in ends.replicas for node in nodes)))
        self.nodes, self._rates = ends.sources, rates
        self.given = [0.0] * len(ends.sources)
        self.out, self.into = [0.0] * num_nodes, [0.0] * num_nodes

    def nearest(self, demand: Demand, count: int) -> int:
        """Of equally near ones that with the least load."""
        return min(demand.holders, key=lambda holder: (self.cost_s(demand, holder, count), self.given[holder]))

    def least(self, demand: Demand, count: int) -> int:
        """The holder for which the largest load that grows stays smallest; of equals that with the least to give."""
        return min(demand.holders, key=lambda holder: self._grown_s(demand, holder, count))

    def _grown_s(self, demand: Demand, holder: int, count: int) -> tuple[float, float]:
        load_s = self.given[holder] + self.cost_s(demand, holder, count)
        source = self.nodes[holder]
        if source == demand.node:
            return load_s, load_s
        nic_s = self.nic_s(demand, count)
        return max(load_s, self.out[source] + nic_s, self.into[demand.node] + nic_s), load_s

    def add(self, demand: Demand, holder: int, count: int, sign: int = 1) -> None:
        self.given[holder] += sign * self.cost_s(demand, holder, count)
        if self.nodes[holder] != demand.node:
            nic = sign * self.nic_s(demand, count)
            self.out[self.nodes[holder]] += nic
            self.into[demand.node] += nic

    def cost_s(self, demand: Demand, holder: int, count: int) -> float:
        rate = self._rates.local if self.nodes[holder] == demand.node else self._rates.network
        return count * (self._rates.latency_s + demand.size_bytes / rate) / self._rates.lanes

    def nic_s(self, demand: Demand, count: int) -> float:
        return count * demand.size_bytes / self._rates.nic

    @property
    def longest_s(self) -> float:
        return max(*self.given, *self.out, *self.into)


def lower_bound_s(demands: Sequence[Demand], loads: Loads) -> float:
    """Of any plan's largest load, receivers' aside.

    For weights of the loads that are not negative and add up to 1, the largest load is at least their weighted mean,
    and that is least where each demand takes the holder of the smallest weighted cost. Any such weights give a bound:
    here each load alone, then weights that begin equal over holders and move to the loads which such choices make large
    (multiplicative weights). Besides, no slice is cut.
    """
    if not demands:
        return 0.0
    table = _Table(demands, loads)
    best = max(min(loads.cost_s(demand, holder, 1) for holder in demand.holders) for demand in demands)
    best = max(best, *(table.weighted(alone_L)[0] for alone_L in np.eye(table.num_loads)))
    logits_L = np.full(table.num_loads, _UNLIKELY)
    logits_L[sorted({holder for demand in demands for holder in demand.holders})] = 0
    for number in range(_ROUNDS):
        weights_L = np.exp(logits_L - logits_L.max())
        value_s, made_L = table.weighted(weights_L / weights_L.sum())
        best = max(best, value_s)
        logits_L += made_L / made_L.max() / math.sqrt(1 + number)
    return best


class _Table:
    """What each demand costs with each holder. The loads: those of holders, of nodes out, of nodes in."""

    def __init__(self, demands: Sequence[Demand], loads: Loads) -> None:
        self._num_holders, self._num_nodes = len(loads.given), len(loads.out)
        self._holder_nodes_H = np.array(loads.nodes)
        self._nodes_D = np.array([demand.node for demand in demands])
        self._given_DH, self._nic_DH = np.zeros((2, len(demands), self._num_holders))
        self._is_able_DH = np.zeros((len(demands), self._num_holders), bool)
        for number, demand in enumerate(demands):
            for holder in demand.holders:
                self._is_able_DH[number, holder] = True
                self._given_DH[number, holder] = loads.cost_s(demand, holder, len(demand.names))
                if loads.nodes[holder] != demand.node:
                    self._nic_DH[number, holder] = loads.nic_s(demand, len(demand.names))

    @property
    def num_loads(self) -> int:
        return self._num_holders + 2 * self._num_nodes

    def weighted(self, weights_L: np.ndarray) -> tuple[float, np.ndarray]:
        """The least weighted mean of the loads, and the loads of the choices that make it."""
        of_given_H, of_out_N, of_into_N = np.split(weights_L, [self._num_holders, self._num_holders + self._num_nodes])
        of_nic_DH = of_out_N[self._holder_nodes_H] + of_into_N[self._nodes_D, None]
        cost_DH = np.where(self._is_able_DH, self._given_DH * of_given_H + self._nic_DH * of_nic_DH, np.inf)
        chosen_D = cost_DH.argmin(1)
        rows = np.arange(len(chosen_D))
        nic_D = self._nic_DH[rows, chosen_D]
        made_L = np.concatenate(
            [
                np.bincount(chosen_D, self._given_DH[rows, chosen_D], self._num_holders),
                np.bincount(self._holder_nodes_H[chosen_D], nic_D, self._num_nodes),
                np.bincount(self._nodes_D, nic_D, self._num_nodes),
            ]
        )
        return float(cost_DH[rows, chosen_D].sum()), made_L

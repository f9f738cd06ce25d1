"""The dock of a run: an object of this process where there is only one, else a process of its own behind sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tranship.config import Config
from tranship.dock import Dock, DockAccess, DockClient, DockProxy, Routes, ServedDock, StageNeeds
from tranship.dock.take_policy import DISPATCH, FIRST_COME, policy_of
from tranship.runtime import Context, ServiceProxy
from tranship.stages import StageSpec
from tranship.types import UserError

_ON_EVERY_SAMPLER = ("rollout", "reward")
_AT_HOME = ("rollout", "recorded", "train", "validate")

# A process of the run waits so long for a dock whose process died: it is started again, or the run ends.
RECONNECT_S = 120.0


def make_dock(
    config: Config,
    table: tuple[StageSpec, ...],
    run_id: str,
    context: Context | None = None,
    *,
    shared: bool = False,
    clock: Callable[[], float] = time.monotonic,
    adopt: Path | None = None,
) -> Dock:
    """The dock of a run. shared: payload in shared memory, since other processes read it; clock, adopt: see Dock."""
    del context
    return Dock(
        stage_needs(config, table),
        run_id=run_id,
        batch_groups=config.groups_per_step,
        staleness=config.dock.staleness,
        on_stale=config.dock.on_stale,
        lease_s=config.dock.lease_s,
        slab_bytes=config.dock.slab_bytes,
        capacity_bytes=config.dock.capacity_bytes,
        shared=shared,
        ordered=config.run.deterministic or config.dock.staleness == 0,
        refill=config.algorithm.dynamic_sampling,
        prefault=config.dock.prefault_slabs,
        clock=clock,
        adopt=adopt,
    )


def stage_needs(config: Config, table: tuple[StageSpec, ...]) -> list[StageNeeds]:
    """The stages as the dock knows them, with the policies of their takes. UserError for a stage or a policy that is
    not there, or that do not fit each other."""
    policies, names = config.dock.policies, [stage.name for stage in table]
    for name in policies:
        if name not in names:
            raise UserError(
                f"dock.policies.{name}: no stage is called {name!r}; those of {config.algorithm.name} are: "
                + ", ".join(names)
            )
    if "train" in policies:
        raise UserError(
            f"dock.policies.train={policies['train']}: train takes the batches that the staleness bound chooses, "
            "whatever the policy: leave it out (run.deterministic=true makes them the groups in order)"
        )
    check_controllers(config, names)
    needs = []
    for stage in table:
        readers = config.placement.num_samplers if stage.name in _ON_EVERY_SAMPLER else 1
        shares_out = stage.name == "rollout" and readers > 1
        policy = policies.get(stage.name, DISPATCH if shares_out else FIRST_COME)
        if policy == "balanced" and "response" not in stage.reads:
            raise UserError(
                f"dock.policies.{stage.name}=balanced: {stage.name} takes prompts, whose responses have no length yet: "
                "use dispatch, which goes by predicted ones, first_come or ordered"
            )
        if policy == DISPATCH and stage.name != "rollout":
            raise UserError(
                f"dock.policies.{stage.name}=dispatch: {stage.name} does not say what it has left to do, as samplers "
                "do: use balanced or first_come"
            )
        needs.append(StageNeeds(stage.name, stage.reads, policy=policy, readers=readers))
        policy_of(needs[-1], f"dock.policies.{stage.name}")
    return needs


def check_controllers(config: Config, names: list[str]) -> None:
    """UserError for a stage whose controller cannot have a process of its own."""
    controllers = list(config.dock.controllers)
    if controllers and config.placement.runtime == "inline":
        raise UserError(f"dock.controllers={controllers}: one process has one dock; set placement.runtime=ray")
    for stage in controllers:
        if stage not in names:
            raise UserError(
                f"dock.controllers: no stage is called {stage!r}; those of {config.algorithm.name} are: "
                + ", ".join(names)
            )
        if stage in _AT_HOME:
            raise UserError(
                f"dock.controllers: {stage} keeps its controller in the dock, which holds it to the staleness bound: "
                "leave it out"
            )
    if len(set(controllers)) < len(controllers):
        raise UserError(f"dock.controllers={controllers}: name each stage once")


class DockHost:
    """The dock's process. Everything but its address goes past the runtime, over sockets.

    secret: the run's. across: nodes other than this one reach it too. adopt: the access of a predecessor that was
    killed; this one goes on from what that one was, at the same addresses.
    """

    def __init__(
        self,
        config: Config,
        table: tuple[StageSpec, ...],
        run_id: str,
        secret: bytes,
        across: bool,
        adopt: DockAccess | None,
        context: Context,
    ) -> None:
        addresses = ["unix:", f"tcp:{context.host}:0"] if across else ["unix:"]
        self._controllers: dict[str, str] = {}
        if adopt is not None:
            addresses = list(adopt.addresses)
            self._controllers |= adopt.controllers
        self._served = ServedDock(
            lambda clock, folder: make_dock(config, table, run_id, shared=True, clock=clock, adopt=folder),
            addresses,
            secret=secret,
            runs=f"tcp:{context.host}:0" if across else None,
            node=context.node,
            durable=config.dock.journal,
            adopt=Path(adopt.folder) if adopt is not None and adopt.folder is not None else None,
        )

    def access(self) -> DockAccess:
        """What other processes need to reach it, and the controllers that it has been told of."""
        return replace(self._served.access, controllers=dict(self._controllers))

    def register(self, stage: str, address: str) -> None:
        """A stage's controller serves at an address."""
        self._controllers[stage] = address

    def close(self) -> None:
        """Stop serving, and remove the payload."""
        self._served.close()


class DockConnection:
    """A worker's side of the dock. client: for its stages; it wakes `context.wakeup` when the dock has changed."""

    def __init__(self, dock: ServiceProxy, config: Config, context: Context) -> None:
        wait_s = config.dock.lease_s
        self._proxy: DockProxy | None = None
        self._routes: Routes | None = None
        if config.placement.runtime == "inline":
            self.client = DockClient(dock.call, context.name, wait_s=wait_s)
            return
        access: DockAccess = dock.call("access")
        address = access.address(context.node)
        self._proxy = proxy = DockProxy(address, access.secret, context.name, reconnect_s=RECONNECT_S)
        if access.controllers:
            self._routes = Routes(
                proxy.call, access.controllers, access.secret, context.name, home_seq=lambda: proxy.seen_seq
            )
        self.client = DockClient.over(
            proxy,
            access.secret,
            context.name,
            wait_s=wait_s,
            node=context.node,
            routes=self._routes,
            seen_seq=lambda _: proxy.seen_seq,
        )
        proxy.watch(context.wakeup)
        if self._routes is not None:
            self._routes.watch(context.wakeup)

    def close(self) -> None:
        """Forget the mappings of this process, and end its connections; the dock stays."""
        self.client.close()
        if self._routes is not None:
            self._routes.close()
        if self._proxy is not None:
            self._proxy.close()

"""Processes of a run that help its dock: the warehouse of another node, the controller of a stage."""

from __future__ import annotations

from pathlib import Path

from tranship.config import Config
from tranship.dock import DockAccess, Keeper, StageController
from tranship.dock.stage_dock import stage_number
from tranship.runtime import Context, ServiceProxy
from tranship.stages import StageSpec
from tranship.worker.dock_service import RECONNECT_S, stage_needs


class WarehouseHost:
    """The process of the warehouse of a node other than the dock's. adopt: the folder that another one left there."""

    def __init__(self, config: Config, run_id: str, access: DockAccess, adopt: str | None, context: Context) -> None:
        self._keeper = Keeper(
            access.address(context.node),
            access.secret,
            context.node,
            run_id=run_id,
            lease_s=config.dock.lease_s,
            host=context.host,
            adopt=None if adopt is None else Path(adopt),
            reconnect_s=RECONNECT_S,
        )

    def left(self) -> str:
        """Where its slabs are, on its node."""
        return str(self._keeper.folder)

    def close(self) -> None:
        """Remove what it keeps."""
        self._keeper.close()


class ControllerHost:
    """The process of a stage's controller. dock: is told where it serves. address: where another one served before."""

    def __init__(
        self,
        config: Config,
        table: tuple[StageSpec, ...],
        stage: str,
        dock: ServiceProxy,
        access: DockAccess,
        address: str | None,
        context: Context,
    ) -> None:
        needs = next(needs for needs in stage_needs(config, table) if needs.name == stage)
        if address is None:
            across = any(not one.startswith("unix:") for one in access.addresses)
            address = f"tcp:{context.host}:0" if across else f"unix:{access.folder}/{stage}"
        self._controller = StageController(
            needs,
            access.address(context.node),
            [address],
            secret=access.secret,
            number=stage_number(stage, config.dock.controllers),
            lease_s=config.dock.lease_s,
            reconnect_s=RECONNECT_S,
        )
        dock.call("register", stage, self.left())

    def left(self) -> str:
        """Where it serves."""
        return self._controller.addresses[0]

    def close(self) -> None:
        """Stop serving."""
        self._controller.close()

"""The sample flow: rows of columns between stages that do not know each other.

Payload lies in slabs (`warehouse`, `slab`, `block`), state in a controller per stage (`controller`), which of the ready
rows a take gives in `take_policy` (`queues`, `balanced`, `dispatch`), the bound on staleness in `policy` and `window`,
and what became of each group in `ledger`. `Dock` is the process that decides; `DockClient` is what a stage holds. Other
processes reach a dock through `service` (`wire`, `frames`, `link`), its payload from other nodes through `runs` and
`remote`; `durable` and `journal` let it outlive its process. A stage's controller may have a process of its own
(`stage_controller`, `stage_dock`, `loans`), to which `routes` leads clients. Other nodes have warehouses of their own:
`warehouses` (their books), `keeper` (their processes), `nodes` (their readers).
"""

from tranship.dock.access import DockAccess
from tranship.dock.batch import Batch, GroupView
from tranship.dock.block import Block, Ragged, pack
from tranship.dock.buffers import Buffers
from tranship.dock.client import DockClient
from tranship.dock.dock import Dock
from tranship.dock.errors import DockFull, StaleLease, StaleSlab
from tranship.dock.keeper import Keeper
from tranship.dock.ledger import Ledger
from tranship.dock.link import DockLink, DockProxy
from tranship.dock.messages import Admission, BlockRef, Publish, StageNeeds, Status, Take
from tranship.dock.policy import feasible
from tranship.dock.routes import Routes
from tranship.dock.served import ServedDock
from tranship.dock.stage_controller import StageController
from tranship.dock.values import Bfloat16
from tranship.dock.warehouse import Warehouse

__all__ = [
    "Admission",
    "Batch",
    "Bfloat16",
    "Block",
    "BlockRef",
    "Buffers",
    "Dock",
    "DockAccess",
    "DockClient",
    "DockFull",
    "DockLink",
    "DockProxy",
    "GroupView",
    "Keeper",
    "Ledger",
    "Publish",
    "Ragged",
    "Routes",
    "ServedDock",
    "StageController",
    "StageNeeds",
    "StaleLease",
    "StaleSlab",
    "Status",
    "Take",
    "Warehouse",
    "feasible",
    "pack",
]

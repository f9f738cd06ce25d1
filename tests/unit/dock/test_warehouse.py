import os
import subprocess
import sys

import pytest

from tranship.dock.errors import DockFull, StaleSlab
from tranship.dock.messages import BlockRef, NodePlace
from tranship.dock.shared_folder import SharedFolder, left_by, sweep
from tranship.dock.slab import block_bytes, check_generation, map_file
from tranship.dock.warehouse import Warehouse
from tranship.dock.warehouses import DistantWarehouse

SLAB = 4096


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def warehouse(request, tmp_path):
    warehouse = Warehouse("test", SLAB, 4 * SLAB, request.param, root=tmp_path)
    yield warehouse
    warehouse.close()


def lease(warehouse: Warehouse, owner: str, giving_up: int | None = None, nbytes: int = 100):
    slab = warehouse.lease_slab(owner, nbytes, giving_up)
    assert slab is not None
    return slab


def memory(warehouse: Warehouse, slab) -> memoryview:
    return warehouse.memory(slab.slab) if slab.path is None else map_file(slab.path, writable=True)


def test_a_full_slab_with_live_rows_is_kept_and_a_dead_one_is_recycled(warehouse):
    first = lease(warehouse, "a")
    warehouse.retain(first.slab, 2)
    second = lease(warehouse, "a", first.slab)
    assert second.slab != first.slab
    warehouse.release(first.slab, 2)
    third = lease(warehouse, "b")
    assert (third.slab, third.generation) == (first.slab, first.generation + 1)
    assert warehouse.use().held_bytes == 2 * SLAB


def test_its_own_pages_come_back_to_an_owner_first(warehouse):
    slabs = {owner: lease(warehouse, owner) for owner in "abc"}
    for owner in "abc":
        warehouse.retain(slabs[owner].slab, 1)
    after = {owner: lease(warehouse, owner, slabs[owner].slab) for owner in "a"}
    for owner in "abc":
        warehouse.release(slabs[owner].slab, 1)
    assert lease(warehouse, "a", after["a"].slab).slab in (slabs["a"].slab, after["a"].slab)


def test_a_late_reader_finds_out(warehouse):
    slab = lease(warehouse, "a")
    view = memory(warehouse, slab)
    ref = BlockRef(slab.slab, slab.generation, 64, 100)
    assert len(block_bytes(view, ref)) == 100
    lease(warehouse, "a", slab.slab)
    with pytest.raises(StaleSlab, match="recycled"):
        block_bytes(view, ref)
    with pytest.raises(StaleSlab):
        check_generation(view, slab.slab + 1, slab.generation)


@pytest.mark.parametrize("at", [(0, 10), (64, SLAB), (64, -1), (SLAB, 64)])
def test_a_block_outside_its_slab_is_refused(warehouse, at):
    slab = lease(warehouse, "a")
    ref = BlockRef(slab.slab, slab.generation, *at)
    with pytest.raises(ValueError, match="does not lie"):
        block_bytes(memory(warehouse, slab), ref)
    with pytest.raises(ValueError, match="does not lie"):
        warehouse.check_block(ref)


def test_only_the_holder_of_a_slab_writes_into_it(warehouse):
    slab = lease(warehouse, "a")
    ref = BlockRef(slab.slab, slab.generation, 64, 10)
    warehouse.check_block(ref, "a")
    with pytest.raises(StaleSlab, match="on lease to a, not to b"):
        warehouse.check_block(ref, "b")
    warehouse.seal("a")
    with pytest.raises(StaleSlab):
        warehouse.check_block(ref, "a")


def test_a_slab_taken_from_its_owner_is_never_written_by_another(warehouse):
    zombie = lease(warehouse, "a")
    view = memory(warehouse, zombie)
    warehouse.seal("a")
    others = [lease(warehouse, owner) for owner in "bcd"]
    assert zombie.slab not in [slab.slab for slab in others]
    view[64:164] = b"z" * 100
    assert all(bytes(memory(warehouse, slab)[64:164]) != b"z" * 100 for slab in others)


def test_a_successor_of_the_same_name_does_not_share_its_predecessors_slab(warehouse):
    old = lease(warehouse, "a")
    new = lease(warehouse, "a")
    assert new.slab != old.slab
    assert lease(warehouse, "b").slab != old.slab


def test_capacity_is_kept_and_named(warehouse):
    for owner in "abcd":
        warehouse.retain(lease(warehouse, owner).slab, 1)
    assert warehouse.lease_slab("e", 100) is None
    assert f"{4 * SLAB} of {4 * SLAB} bytes" in warehouse.use().refusal
    with pytest.raises(DockFull, match=r"dock\.capacity_bytes is 16384: raise it"):
        warehouse.lease_slab("e", 5 * SLAB)


def test_a_large_block_gets_a_slab_of_its_own_that_serves_the_next_one_of_its_size(warehouse):
    big = lease(warehouse, "a", nbytes=2 * SLAB)
    assert big.nbytes == 3 * SLAB
    warehouse.retain(big.slab, 1)
    lease(warehouse, "a", big.slab)
    warehouse.release(big.slab, 1)
    assert warehouse.use().held_bytes == 4 * SLAB
    again = lease(warehouse, "b", nbytes=2 * SLAB - 100)
    assert (again.slab, again.generation) == (big.slab, big.generation + 1)
    assert warehouse.use().held_bytes == 4 * SLAB


def test_free_slabs_make_room_for_a_large_one(warehouse):
    for owner in "abcd":
        warehouse.retain(lease(warehouse, owner).slab, 1)
    for slab in range(1, 5):
        warehouse.release(slab, 1)
    for owner in "abcd":
        warehouse.lease_slab(owner, 100, {"a": 1, "b": 2, "c": 3, "d": 4}[owner])
        warehouse.seal(owner)
    assert lease(warehouse, "e", nbytes=3 * SLAB).nbytes > 3 * SLAB
    assert warehouse.use().held_bytes <= 4 * SLAB


def test_a_machine_without_shared_memory_left_is_a_refusal_not_a_crash(tmp_path, monkeypatch):
    warehouse = Warehouse("test", SLAB, 4 * SLAB, True, root=tmp_path)

    def full(descriptor, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DockFull, match=r"No space left on device\): free some, or lower dock\.slab_bytes"):
        warehouse.lease_slab("a", 100)
    monkeypatch.undo()
    assert warehouse.lease_slab("a", 100) is not None
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert warehouse.lease_slab("b", 100) is None
    assert "has no room for 4096 bytes more (No space left on device)" in warehouse.use().refusal
    monkeypatch.undo()
    assert warehouse.lease_slab("b", 100) is not None
    warehouse.close()


def test_close_removes_everything_and_may_be_repeated(tmp_path):
    warehouse = Warehouse("test", SLAB, 4 * SLAB, True, root=tmp_path)
    lease(warehouse, "a")
    assert len(list(tmp_path.iterdir())) == 1
    warehouse.close()
    warehouse.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from tranship.dock.warehouse import Warehouse\n"
        "w = Warehouse('dead', 4096, 1 << 20, True, root=Path(sys.argv[1])); w.lease_slab('a', 10)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    mine = SharedFolder("alive", tmp_path)
    for other in ("tranship-x", "tranship-x-notapid", "another-1-99999999"):
        (tmp_path / other).mkdir()
    (tmp_path / "tranship-file-99999999").write_text("")
    assert len(list(tmp_path.glob("tranship-dead-*/*.slab"))) == 1
    removed = sweep(tmp_path)
    assert [name.rpartition("-")[0] for name in removed] == ["tranship-dead"]
    assert mine.path.exists()
    assert sweep(tmp_path) == []
    mine.close()


def test_a_folder_whose_lock_is_held_elsewhere_is_not_swept(tmp_path):
    """As in a container that shares the memory, but not the process ids."""
    mine = SharedFolder("alive", tmp_path)
    foreign = tmp_path / "tranship-alive-999999999"
    mine.path.rename(foreign)
    assert sweep(tmp_path) == []
    assert foreign.exists()


def test_run_ids_of_any_text_name_a_folder(tmp_path):
    folders = [SharedFolder(run_id, tmp_path) for run_id in ("a b/../c", "a b/../c", "x" * 500)]
    assert len({folder.path for folder in folders}) == 3
    assert all(folder.path.parent == tmp_path for folder in folders)
    for folder in folders:
        folder.close()


def test_slabs_made_at_the_start_serve_the_first_writers(tmp_path):
    warehouse = Warehouse("test", SLAB, 3 * SLAB, True, root=tmp_path, prefault=5)
    assert warehouse.use().held_bytes == 3 * SLAB
    assert warehouse.use().busy_bytes == 0
    assert {lease(warehouse, owner).slab for owner in "abc"} == {1, 2, 3}
    assert warehouse.lease_slab("d", 100) is None
    warehouse.close()


def test_what_a_durable_dock_left_is_kept_for_its_successor_for_a_minute(tmp_path):
    folder = tmp_path / "tranship-run-999999999"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "journal").touch()
    assert sweep(tmp_path) == []
    assert left_by("run", tmp_path) == folder
    os.utime(folder / "journal", (0, 0))
    assert sweep(tmp_path) == [folder.name]
    assert left_by("run", tmp_path) is None


def test_a_warehouse_of_another_node_says_what_a_put_waits_for():
    warehouse = DistantWarehouse(NodePlace(1, "node-b", "/nowhere", "nobody"), SLAB, 2 * SLAB)
    assert warehouse.lease_slab("a", 100) is None
    assert warehouse.use().refusal == "the keeper of node node-b has not made it yet"
    assert warehouse.lease_slab("b", SLAB) is None
    assert f"{SLAB} of {2 * SLAB} bytes (dock.capacity_bytes) are in use on node node-b" in warehouse.use().refusal

"""What was written comes back, whatever happened to the end of the file."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.dock.journal import Journal

ENTRIES = [["m", 1.5, "name", b"bytes"], ["e", 2.0], ["s", 3.0, [1, [2], True], None]]


def written(path, entries=ENTRIES) -> Journal:
    journal = Journal(path)
    for entry in entries:
        journal.append(*entry)
    return journal


def test_entries_come_back_and_more_can_follow(tmp_path):
    written(tmp_path / "journal").close()
    journal = Journal(tmp_path / "journal")
    assert list(journal.entries()) == ENTRIES
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES, ["more"]]
    assert os.stat(tmp_path / "journal").st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_torn_or_damaged_end_is_as_if_it_had_never_been(tmp_path, data):
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    sizes = [0]
    journal = Journal(path)
    for entry in ENTRIES:
        journal.append(*entry)
        sizes.append(journal.nbytes)
    journal.close()
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    whole = sum(size <= place for size in sizes[1:])
    journal = Journal(path)
    assert list(journal.entries()) == ENTRIES[:whole]
    assert path.stat().st_size == journal.nbytes == sizes[whole]
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES[:whole], ["more"]]
    journal.close()


def test_it_starts_again_at_once(tmp_path):
    journal = written(tmp_path / "journal")
    journal.start_again("base", {"a": 1})
    journal.append("more")
    journal.close()
    assert list(Journal(tmp_path / "journal").entries()) == [["base", {"a": 1}], ["more"]]
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_a_full_file_system_leaves_nothing_of_an_entry(tmp_path, monkeypatch):
    journal = written(tmp_path / "journal")
    write = os.write

    def half(descriptor, data):
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="no room"):
        journal.append("lost", b"x" * 100)
    monkeypatch.undo()
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES, ["more"]]

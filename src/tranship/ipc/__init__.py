"""What the pools of processes share: frames on a pipe, and the mailbox of the thread that serves a pool."""

from tranship.ipc.frames import FrameReader, pack
from tranship.ipc.mailbox import Mailbox

__all__ = ["FrameReader", "Mailbox", "pack"]

"""One thread per rank that notices what a blocked rank cannot: a peer that failed, died or froze.

Ranks meet in a key-value store, not in collectives. Each rank beats, and watches the next one; so
the traffic per rank does not grow with the world. The first failure is written to the store once;
every watchdog that sees it gives its own rank a few seconds to end in order, then ends it. One rank
prints the story; it is also what torchrun shows last.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdrl.exits import BAD_CONFIG, FAILED, leave_for_torchrun

PERIOD_S = 0.5
STALLED = "no progress"
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
LAST_WORD_S = 10.0  # how much sooner the rank that got on last may say that all have stopped
GRACE_S = 3.0  # from the first word of a failure until a rank that is still blocked is ended


class Watchdog:
    """Runs until `close`. Story: a dict with rank, host, phase, cause and details.

    store: a connection of its own (Store.clone), since calls on a store block each other.
    lost_s: a rank without a beat for so long is lost. stall_s: no new phase for so long is a hang,
    unless another rank gets on, for which this one may be waiting.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, folder: Path, stall_s: float,
        lost_s: float = 20.0,
    ) -> None:  # fmt: skip
        self.store, self.rank, self.world, self.folder = store, rank, world, folder
        self.stall_s, self.lost_s = stall_s, lost_s
        self.host = socket.gethostname()
        self.phase, self.phase_since = "start", time.monotonic()
        self.reached = time.monotonic()  # the last time the store answered
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.guard = threading.Thread(target=self._guard, name="watchdog-guard", daemon=True)
        self.thread.start()
        self.guard.start()

    def progress(self, phase: str) -> None:
        self.phase, self.phase_since = phase, time.monotonic()

    def report(self, story: dict[str, Any]) -> None:
        """Makes this rank's failure known: errors/rank_R.json, and the store if it is the first."""
        if any(words in story["cause"] for words in LOST_PEER):
            # this rank only feels another's end: give it, its neighbour or torchrun time to tell
            self.done.wait(self.lost_s + 2 * PERIOD_S)
        self.store.compare_set("story", "", json.dumps(story))
        if story["config_error"]:
            return
        with suppress(OSError):  # the disk may be what is wrong
            self.folder.mkdir(parents=True, exist_ok=True)
            Path(self.folder, f"rank_{story['rank']}.json").write_text(json.dumps(story, indent=1))

    def first_story(self) -> dict[str, Any] | None:
        return json.loads(self.store.get("story")) if self.store.check(["story"]) else None

    def tell(self, story: dict[str, Any]) -> None:
        """Prints the story on one rank only, and leaves it where torchrun looks for it."""
        text = "rank {rank} on {host} failed in phase '{phase}': {cause}".format(**story)
        where = f"\nspmdrl: details in {Path(self.folder, 'rank_{rank}.json'.format(**story))}"
        if story["config_error"]:
            text, where = "config error: {cause}".format(**story), ""
        leave_for_torchrun(text)
        if self.store.add("claims", 1) == 1:
            print(f"\nspmdrl: {text}{where}", file=sys.stderr, flush=True)
            self.store.set("told", "1")
        end = time.monotonic() + 2
        while not self.store.check(["told"]) and time.monotonic() < end:
            time.sleep(0.05)

    def close(self) -> None:
        """Says goodbye, so that the rank that watches this one does not miss it."""
        self.done.set()
        self.thread.join(timeout=5)
        self.store.set(f"beat/{self.rank}", "bye")

    def _watch(self) -> None:
        count, story_since = 0, None
        told, others, others_since = self.phase_since, b"", time.monotonic()
        peer = (self.rank + 1) % self.world
        peer_beat, peer_since = "", time.monotonic()
        while not self.done.wait(PERIOD_S):
            try:
                count += 1
                self.store.set(f"beat/{self.rank}", f"{count} {self.host} {self.phase}")
                story = self.first_story()
                key = f"beat/{peer}"
                beat = self.store.get(key).decode() if self.store.check([key]) else ""
                if self.phase_since != told and count % 8 == 0:
                    told = self.phase_since
                    self.store.set("progress", f"{self.rank} {told}")
                elif time.monotonic() - self.phase_since > self.stall_s / 2:
                    seen = self.store.get("progress") if self.store.check(["progress"]) else b""
                    if seen != others:
                        others, others_since = seen, time.monotonic()
            except RuntimeError:  # the store's host is gone, or slow: the guard decides
                continue
            now = self.reached = time.monotonic()
            if story is not None:
                story_since = story_since or now
                if now - story_since > GRACE_S:
                    self._end(story)
                continue
            if beat != peer_beat or beat in ("", "bye"):
                peer_beat, peer_since = beat, now
            if now - peer_since > self.lost_s:
                silent = f"no sign of life for {now - peer_since:.0f} s"
                _, host, phase = beat.split(" ", 2)
                self._report(peer, host, phase, silent)
            elif now - self.phase_since > self.stall_s and self._is_last(
                others, now - others_since
            ):
                stalled = f"{STALLED} for {now - self.phase_since:.0f} s (stall_timeout_s)"
                self._report(self.rank, self.host, self.phase, stalled)

    def _is_last(self, others: bytes, silent_s: float) -> bool:
        """Whether the job has stopped, as far as this rank can tell. Who has stood still longest
        says so first; of ranks that stopped within LAST_WORD_S of each other, who got on last: the
        others were waiting for it."""
        mine = others.startswith(f"{self.rank} ".encode())
        return silent_s > self.stall_s / 2 + (0 if mine else LAST_WORD_S)

    def _report(self, rank: int, host: str, phase: str, cause: str) -> None:
        self.report(
            {"rank": rank, "host": host, "phase": phase, "cause": cause, "config_error": False,
             "details": f"noticed by rank {self.rank} on {self.host}"}
        )  # fmt: skip

    def _guard(self) -> None:
        """Reads from a store whose host vanished may block for ever; this thread never reads it."""
        while not self.done.wait(PERIOD_S):
            silent_s = time.monotonic() - self.reached
            if silent_s > self.lost_s:
                text = (
                    f"rank {self.rank} on {self.host} lost the rendezvous store for {silent_s:.0f} "
                    f"s in phase '{self.phase}': its host is gone, or this one is cut off"
                )
                leave_for_torchrun(text)
                print(f"\nspmdrl: {text}", file=sys.stderr, flush=True)
                os._exit(FAILED)

    def _end(self, story: dict[str, Any]) -> None:
        if STALLED in story["cause"]:
            faulthandler.dump_traceback(sys.stderr)  # every rank's, to see who waits for whom
        self.tell(story)
        # the main thread may be blocked in a collective that never returns
        os._exit(BAD_CONFIG if story["config_error"] else FAILED)

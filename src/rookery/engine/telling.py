"""Tells the runners of a run what will begin there, where their sandboxes take long to make.

Promises:
- a runner is told only what changed for it, and hears of a task once as long as that is expected there;
- a rollout goes to a runner that expects it, unless that has twice its part of the work already;
- a run that stops or ends expects nothing more.
"""

from collections.abc import Collection, Iterable

from rookery.engine import wire
from rookery.engine.ahead import Ahead, in_turns, of_stream
from rookery.engine.channel import Channel
from rookery.engine.fleet import Fleet
from rookery.engine.links import Link


class Telling:
    """Between the schedule and the links. With a `most` of 0 it does nothing."""

    def __init__(self, fleet: Fleet, most: int) -> None:
        self._fleet = fleet
        self._ahead = Ahead(most)

    def expecting(self, task: str) -> Link | None:
        """The runner that may have a sandbox ready for the next rollout of this task."""
        if not self._ahead.most:
            return None
        most = 2 * self._fleet.capacity
        able = {link.name: link for link in self._fleet.links if link.shared and len(link.running) < most}
        name = self._ahead.begun(task, list(able))
        return able[name] if name is not None else None

    def tell(self, channels: Iterable[Channel], quarantined: Collection[str] = ()) -> None:
        """What these will begin. During a pause nobody is told anything."""
        if not self._ahead.most:
            return
        live = [channel for channel in channels if not (channel.closed or channel.error)]
        wanted = in_turns(of_stream(channel.schedule, channel.upcoming()) for channel in live)
        links = {link.name: link for link in self._fleet.links if link.shared}
        busy = {name: len(link.running) for name, link in links.items()}
        for name, dealt in self._ahead.deal(wanted, busy, quarantined).items():
            link, said = links[name], [(task.id, count) for task, count in dealt]
            if said != link.expects:
                known = {task for task, _ in link.expects}
                link.expects = said
                link.send(wire.Soon(said, [task for task, _ in dealt if task.id not in known]))

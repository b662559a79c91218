"""Pictures that can't be read, where the user has asked to go on without them: told, counted, and refused when many."""

from manyhands.core.errors import RunError
from manyhands.parallel.plain import gather_plain
from manyhands.train.data_setup import check_bad_pictures, some_pictures
from manyhands.train.trainer import Trainer


def record_replaced(trainer: Trainer) -> None:
    """Tells of the pictures that others were given for since the last time; a collective.

    Raises:
        RunError: they are too many by now; alike on all processes.
    """
    mine = trainer.feed.loader.replaced
    found = {name for names in gather_plain(mine, trainer.world) for name in names}
    mine.clear()
    trainer.bad_pictures |= found
    step = trainer.progress.step
    message = f"{len(found)} unreadable picture(s) were replaced by other pictures: {some_pictures(found)}"
    trainer.journal.event("replaced", message, step, count=len(found), pictures=sorted(found))
    check_bad_pictures(trainer.bad_pictures, trainer.feed.order.length, RunError)

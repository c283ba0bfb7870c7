"""Which version of a stand-in model answers: a digest of its sources."""

from functools import cache

from qinglan.artifacts import hash_of
from qinglan.embedded.worlds import source_texts, speakers

_SERVER = "teacher_server.py"


@cache
def embedded_version(model: str) -> str:
    """Changes whenever the stand-in's answers could, never with another world's; `unknown` where none has that name.

    Such a model is refused before a run, and by the server.
    """
    world = speakers().get(model)
    return hash_of(source_texts(world, (_SERVER, *world.SPEAKER_SOURCES)))[:12] if world else "unknown"

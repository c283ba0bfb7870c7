"""A recipe outside the package, for tests: its answers have a form that can be wrong."""

from capitals_recipe import Capitals

from qinglan.errors import TeacherError


class Strict(Capitals):
    """Wants a tag, and no inputs."""

    NAME = "strict_recipe"
    INPUTS = ()

    def parse_answer(self, text: str) -> str:
        if "<output>" not in text:
            raise TeacherError("no tags", "bad_format")
        return text


RECIPE = Strict()

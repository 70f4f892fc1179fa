"""Tasks with images: their records and stop reasons."""

import pytest

from agentloop.images import shown
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rollout.context import LoopContext
from agentloop.simulation.engine import SimulatedSpec
from agentloop.types import Message, RolloutTask, StopReason
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.seeing import SeeingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.worker import running_worker
from tests.support.records.vision_folder import picture, write_vision_folder

RED, BLUE = picture(20, 20), picture(90, 50, (1, 2, 200))


class LookAgain:
    """A loop that shows the task's second image after the first turn."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=5)
        content, images = shown(["Now ", BLUE, "?"])
        ctx.observe(Message("user", content, images=images))
        await ctx.sample(max_tokens=5)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer.from_directory(write_vision_folder(tmp_path_factory.mktemp("vision")))


def seeing(renderer: TemplateRenderer) -> SeeingEngine:
    return SeeingEngine(
        renderer, spec=SimulatedSpec(vocab_size=299), policy=ScriptedPolicy(lambda prompt: [1, 2, 3])
    )


async def rolled_out(
    engine: SeeingEngine, task: RolloutTask, renderer: TemplateRenderer, *, takes_images: bool = True
):
    feeder = FakeCoordinator([task])
    async with running_worker(feeder, {"sim://a": engine}, renderer, takes_images=takes_images):
        await feeder.is_done.wait()
    return feeder.records[f"{task.task_id}/0"]


def task(*images, **fields) -> RolloutTask:
    content, refs = shown(["Look: ", RED])
    loop = f"{LookAgain.__module__}:{LookAgain.__name__}"
    return RolloutTask("t", (Message("user", content, images=refs),), loop=loop, images=images, **fields)


async def test_images_of_a_task_are_in_its_record(renderer):
    engine = seeing(renderer)
    record = await rolled_out(engine, task(RED, BLUE), renderer)
    assert (record.stop_reason, record.is_complete) == (StopReason.COMPLETED, True)
    (path,) = record.paths
    ids = (*path.prompt_ids.tolist(), *path.response_ids.tolist())
    tokens = await engine.image_tokens([RED, BLUE])
    assert [span.sha256 for span in path.images] == [RED.sha256, BLUE.sha256]
    assert [ids[span.start : span.end] for span in path.images] == [one.token_ids for one in tokens]
    first, second = engine.requests
    assert (first.token_ids, first.images) == (tuple(path.prompt_ids.tolist()), path.images[:1])
    assert (second.token_ids, second.images) == (ids[: path.turns[1].prompt_len], path.images)
    assert [len(message.images) for message in record.messages] == [1, 0, 1, 0]


@pytest.mark.parametrize("takes_images", [True, False])
async def test_an_image_that_cannot_be_shown_ends_the_trajectory(renderer, takes_images):
    engine = seeing(renderer)
    brought = (RED,) if takes_images else (RED, BLUE)  # the loop shows BLUE, which the task does not contain
    record = await rolled_out(engine, task(*brought), renderer, takes_images=takes_images)
    assert record.stop_reason is StopReason.LOOP_FAILED
    assert not record.is_complete
    assert ("was not uploaded" if takes_images else "takes no images") in record.error

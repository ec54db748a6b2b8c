"""How much of what a judge can serve eight ranks get out of it, with the recipe's settings, over real HTTP. Linux, CPU.

    python -m tests.bench.bench_slow_judge [--questions N] [--seconds S] [--only steady|slows]

The server, a process of its own, answers 32 questions at once, 2 s each; more wait in line, and leave it when their
connection is closed. Eight processes ask it 2,000 questions with the settings of `rewards.judge` in
configs/medium_qwen3_4b.yaml, each as many as its limit allows, without knowing of the others. In `slows` an answer takes
five times as long from the middle on. At full size the two take nine minutes, most of which is waiting.

share     seconds that the answers needed of the whole server, divided by those from the first question to the last
          answer (goal: at least 0.9).
failures  questions without an answer (goal: none).
left      questions whose connection was closed before the server had answered, all of them asked again.

The last line is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo.config_file import load_config
from rollout.roles.client import LLMClient, LLMError
from rollout.settings import EndpointSettings
from tests.asking import QUESTION, SCHEMA
from tests.bench.figures import Figures

SLOTS, SLOWER, NUM_RANKS, GOAL = 32, 5.0, 8, 0.9
BODY = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": '{"score": 0.5}'}}
        ],
    }
).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Server:
    def __init__(self, seconds: float, slows_after: float):
        self.seconds, self.slows_after = seconds, slows_after
        self.slots = asyncio.Semaphore(SLOTS)
        self.answered = self.left = 0
        self.needed_s = 0.0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection: one question after another, until the client closes it."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                answer, closed = asyncio.create_task(self._answer()), asyncio.create_task(reader.read(1))
                await asyncio.wait((answer, closed), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    answer.cancel()
                    self.left += 1
                    return
                writer.write(RESPONSE)
                await writer.drain()
                if not await closed:  # else it was the first byte of the next question
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self) -> None:
        async with self.slots:
            seconds = self.seconds * (SLOWER if self.answered >= self.slows_after else 1.0)
            await asyncio.sleep(seconds)
            self.answered += 1
            self.needed_s += seconds / SLOTS


def serve(pipe: Connection, seconds: float, slows_after: float) -> None:
    async def until_told() -> None:
        server = Server(seconds, slows_after)
        listener = await asyncio.start_server(server.talk, "127.0.0.1", 0, backlog=1024)
        pipe.send(listener.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)
        pipe.send({"needed_s": server.needed_s, "left": server.left})

    asyncio.run(until_told())


def ask(port: int, num_questions: int, pipe: Connection) -> None:
    async def ask_all() -> list[Any]:
        client = LLMClient("judge", settings)
        outcomes = await asyncio.gather(
            *(client.ask(QUESTION, SCHEMA) for _ in range(num_questions)), return_exceptions=True
        )
        await client.close()
        return outcomes

    recipe = load_config(Path("configs/medium_qwen3_4b.yaml")).rewards.judge
    settings = EndpointSettings(**recipe.model_dump() | {"base_url": f"http://127.0.0.1:{port}/v1"})
    pipe.send("ready")
    pipe.recv()
    pipe.send(sum(isinstance(outcome, LLMError) for outcome in asyncio.run(ask_all())))


def measure(num_questions: int, seconds: float, slows_after: float) -> Figures:
    context = multiprocessing.get_context("spawn")

    def start(target: Any, *arguments: Any) -> tuple[Any, Connection]:
        own, others = context.Pipe()
        place = [others if argument is Connection else argument for argument in arguments]
        process = context.Process(target=target, args=place, daemon=True)
        process.start()
        return process, own

    server, to_server = start(serve, Connection, seconds, slows_after)
    port = to_server.recv()
    ranks = [start(ask, port, num_questions // NUM_RANKS, Connection) for _ in range(NUM_RANKS)]
    for _, pipe in ranks:
        pipe.recv()
    started = time.monotonic()
    for _, pipe in ranks:
        pipe.send("go")
    failures = sum(pipe.recv() for _, pipe in ranks)
    wall_s = time.monotonic() - started
    to_server.send("stop")
    seen = to_server.recv()
    for process in (server, *(process for process, _ in ranks)):
        process.join()
    return {"wall_s": wall_s, "share": seen["needed_s"] / wall_s, "failures": failures, "left": seen["left"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of what a judge can serve eight ranks get out of it.")
    parser.add_argument("--questions", type=int, default=2000, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one answer [%(default)s]")
    parser.add_argument("--only", choices=("steady", "slows"))
    options = parser.parse_args()
    cases = {"steady": float("inf"), "slows": options.questions / 2}
    result: Figures = {}
    for name, slows_after in cases.items():
        if options.only in (None, name):
            found = result[name] = measure(options.questions, options.seconds, slows_after)
            reached = "reached" if found["share"] >= GOAL and not found["failures"] else "MISSED"
            print(f"{name}: {found['wall_s']:.0f} s, {found['share']:.3f} of what the server can do", end=", ")
            print(f"{found['failures']} failures, {found['left']} left (goal {GOAL}, none: {reached})", flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

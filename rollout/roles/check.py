"""Before a run: can a role's servers play it? Each is asked for its models, and then one question of the run's kind.

The question goes out exactly as all later ones will, so that a server which refuses a parameter, a schema or a length
says so now, and once more after what may be an accident. It also takes the place of the list of models where there is
none.
"""

from __future__ import annotations

import asyncio

import openai

from rollout.roles.endpoints import Address, presentable, read_key
from rollout.roles.question import HTTP_OVERLOADED, YAML_SECTION, Caller, Failed, Question, Role
from rollout.settings import EndpointSettings

SAMPLE_REPLY = "What would you like it to say?"
"""The assistant's words in the chat that the question is about."""
LIST_TIMEOUT_S, QUESTION_TIMEOUT_S = 10.0, 30.0


def check_role(role: Role, settings: EndpointSettings, question: Question) -> list[str]:
    """Asks all servers at once. Raises ValueError, a line with the remedy for each that cannot play the role. Returns
    notes on what may become a fault: no answer in time, from one that may be busy, or an answer of no use, as any model
    gives now and then.
    """
    section, key = YAML_SECTION[role], read_key(YAML_SECTION[role], settings.api_key_env)
    addresses = [Address(url, key) for url in settings.addresses]

    async def ask_all() -> list[str | BaseException]:
        checks = (_Check(role, settings, address).run(question) for address in addresses)
        return await asyncio.gather(*checks, return_exceptions=True)

    notes, faults = [], []
    for address, outcome in zip(addresses, asyncio.run(ask_all()), strict=True):
        if isinstance(outcome, _Fault):
            place = f"{section}.base_url: {address.shown}: " if outcome.of_the_address else ""
            faults.append(place + str(outcome) + (PROXY_NOTE if address.proxied else ""))
        elif isinstance(outcome, BaseException):
            raise outcome
        elif outcome:
            notes.append(f"note: {section}: {address.shown}: {outcome}")
    if faults:
        raise ValueError("\n".join(faults))
    return notes


PROXY_NOTE = (
    " (it was asked through the proxy that the environment names; list its host in NO_PROXY to ask it without one)"
)


class _Fault(Exception):
    def __init__(self, text: str, *, of_the_address: bool = True):
        super().__init__(text)
        self.of_the_address = of_the_address


class _Check:
    """Of one server."""

    def __init__(self, role: Role, settings: EndpointSettings, address: Address):
        self._section, self._settings, self._address = YAML_SECTION[role], settings, address
        self._present = presentable(address.secrets)
        self._caller = Caller(role, settings, self._present)

    async def run(self, question: Question) -> str | None:
        """A note, or None. Raises _Fault."""
        try:
            server = self._address.server
        except ValueError as error:
            raise _Fault(str(error)) from None
        try:
            await self._look_for_the_model(server)
            failure = await self._failure(server, question)
            if failure and failure.error.worth_a_retry and failure.error.kind != "timeout":
                failure = await self._failure(server, question)
            return self._note_or_fault(failure) if failure else None
        finally:
            await server.close()

    async def _failure(self, server: openai.AsyncOpenAI, question: Question) -> Failed | None:
        try:
            await self._caller.answer(server, question, min(self._settings.timeout_s, QUESTION_TIMEOUT_S))
        except Failed as failure:
            return failure

    async def _look_for_the_model(self, server: openai.AsyncOpenAI) -> None:
        """Raises _Fault where nobody can be asked, or the model is not in the list; without one, the question tells."""
        model = self._settings.model
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                listing = await server.models.list(timeout=LIST_TIMEOUT_S)
            models = [str(served.id) for served in listing.data]
        except (TimeoutError, openai.APITimeoutError):
            raise _Fault(f"the server did not answer in {LIST_TIMEOUT_S:g} s; {_START}") from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise _Fault(self._refusal(error.status_code, self._present(error.message))) from None
        except openai.APIConnectionError as error:
            reason = self._present(str(error.__cause__ or error))
            raise _Fault(f"cannot reach the server ({reason}); {_START}") from None
        except (openai.OpenAIError, ValueError, AttributeError, TypeError, RecursionError):
            pass  # no list
        else:
            if model not in models:
                raise _Fault(
                    f"{self._section}.model: {model!r} is not served at {self._address.shown}, which has: "
                    f"{self._present(', '.join(models)) or 'nothing'}; name one of these, or serve that model",
                    of_the_address=False,
                )

    def _note_or_fault(self, failure: Failed) -> str:
        """Raises _Fault where all further questions would end as the first did."""
        error = failure.error
        if failure.foreign:
            raise _Fault(f"what answers there is not an OpenAI-compatible server; {_START}")
        if error.kind == "timeout":
            return f"a first question found {error.detail}; if it is not busy with other work, it will be slow"
        if error.kind in ("not_json", "schema", "cut"):
            return f"the answer to a first question is of no use ({error.kind}: {error.detail})"
        if error.status == 429:
            return f"it takes no more questions now (HTTP 429: {error.detail})"
        if error.status is None:
            raise _Fault(f"cannot reach the server ({error.detail}); {_START}")
        raise _Fault(self._refusal(error.status, error.detail))

    def _refusal(self, status: int, said: str) -> str:
        answered = f"the server answered HTTP {status}: {said}"
        if status in (401, 403):
            remedy = f"set {self._section}.api_key_env to the environment variable that holds a valid key"
        elif status == 404:
            remedy = "correct the address, which usually ends in /v1, or the model's name"
        elif status in HTTP_OVERLOADED:
            remedy = _START
        else:
            remedy = self._remedy_of_a_parameter(said)
        return f"{answered}; {remedy}"

    def _remedy_of_a_parameter(self, said: str) -> str:
        """Those of the parameters that the server named; of all, where it named none."""
        settings, out = self._settings, self._settings.leave_out
        renamed = "max_completion_tokens" if settings.max_tokens_name == "max_tokens" else "max_tokens"
        remedies = {
            parameter: f"{parameter}: {self._section}.leave_out=[{', '.join([*out, parameter])}]"
            for parameter in ("chat_template_kwargs", "temperature", "strict", "response_format")
            if parameter not in out
        }
        remedies["max_tokens"] = (
            f"max_tokens: {self._section}.max_tokens_name={renamed}, or a smaller {self._section}.max_tokens"
        )
        named = [remedy for parameter, remedy in remedies.items() if parameter in said.replace(renamed, "max_tokens")]
        if "schema" in said and not named:
            named = [remedies[parameter] for parameter in ("strict", "response_format") if parameter in remedies]
        return "if it refuses a parameter, leave that out or rename it: " + "; ".join(named or remedies.values())


_START = "start the role servers (bash launch/serve_roles.sh) or correct the address"

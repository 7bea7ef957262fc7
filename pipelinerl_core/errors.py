"""The error tree. Every message states what was found, which rule applies, and what to set or do."""

EXIT_CONFIG = 2
"""Exit code of a process that ends with a ConfigError."""
EXIT_FENCED = 3
"""Exit code of a process that ends with Fenced."""
EXIT_STORE = 4
"""Exit code of a process that ends with StoreUnavailable."""
EXIT_DIVERGED = 5
"""Exit code of a process that ends with TrainingDiverged."""
EXIT_EXPELLED = 6
"""Exit code of an actor that ends with Expelled; its supervisor does not start the actor again."""


class PipelineRLError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(PipelineRLError):
    """A wrong configuration or input; the command line prints it as one line and exits with 2."""


class ParityError(ConfigError):
    """Engine and trainer disagree on the log-probabilities of the same tokens; another start would find the same."""


class StoreError(PipelineRLError):
    """The object store refused, lost or corrupted an object."""


class MissingObject(StoreError):
    """An object that a manifest or commit names does not exist."""


class BrokenRecord(StoreError):
    """A record of a run is broken, has a number out of its range, or has another format version."""


class ChecksumMismatch(StoreError):
    """The bytes of an object differ from their recorded digest."""


class StoreUnavailable(StoreError):
    """The object store did not answer, or had no space, for as long as requests are repeated."""


class StreamError(PipelineRLError):
    """The channel between a role and the hub failed."""


class SchemaMismatch(StreamError):
    """Rows of another major schema version, or rows that break the schema."""


class NotReserved(StreamError):
    """The trainer has no reservation of these groups at the hub; it must reserve the step again."""


class HubUnavailable(StreamError):
    """No hub answered within the deadline."""


class RunOver(StreamError):
    """The hub has ended after the last committed step."""


class StaleLease(StreamError):
    """Rows were sent for a lease that this actor no longer holds."""


class WrongPeer(StreamError):
    """A message that names another peer than its sender, or belongs to another role."""


class EngineError(PipelineRLError):
    """The engine cannot generate."""


class PromptRefused(EngineError):
    """The prompt of a request can never be served: it has no token, or is too long."""


class SwapError(EngineError):
    """A weight swap failed; the engine keeps its last good version or is dead."""


class BroadcastError(PipelineRLError):
    """Weights could not be broadcast; actors read them from the store instead."""


class RewardError(PipelineRLError):
    """A verifier failed to give a reward."""


class FunctionRaised(RewardError):
    """The code of a verifier raised an exception, possibly because of one text."""


class EnvironmentFailed(RewardError):
    """An episode has no result: the environment failed, or a conversation could not be turned into tokens."""


class EnvironmentNotStarted(EnvironmentFailed):
    """No process of the environment has started, and the environment itself did not say why."""


class EnvironmentTimeout(EnvironmentFailed):
    """The environment took more than environment.call_seconds or environment.episode_seconds."""


class OutOfMemory(PipelineRLError):
    """A GPU had no memory left, in a process that has completed optimizer steps before."""


class TrainingDiverged(PipelineRLError):
    """A number of an optimizer step is not finite; the step is not taken, and weights and optimizer are unchanged."""


class RankLost(PipelineRLError):
    """A rank of the trainer has ended or does not answer; the current step was not committed."""


class Expelled(PipelineRLError):
    """The engine of this actor does not sample from the versions that its tokens name; the actor must end."""


class Fenced(PipelineRLError):
    """A newer epoch of this role has started; this process must stop."""


class DeadlineExceeded(PipelineRLError):
    """A named wait reached its deadline."""

"""PipelineRL: asynchronous reinforcement learning of language models."""

import logging

__version__ = "0.1.0"


class _NotOnStdout(logging.Filter):
    """DeepSpeed, which vLLM and others import where it is installed, writes its log to stdout: results are there."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            logging.getLogger().handle(record)
        return False


logging.getLogger("DeepSpeed").addFilter(_NotOnStdout())

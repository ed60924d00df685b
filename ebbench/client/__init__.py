"""The load generator: drives any OpenAI-compatible server so that the client is never the story."""

from ebbench.client.drive import DriveResult, drive
from ebbench.client.options import ClientOptions

__all__ = ["ClientOptions", "DriveResult", "drive"]

"""Load generator: sends the requests of a plan to an OpenAI-compatible server and measures the responses."""

from ebbench.client.drive import DriveResult, drive
from ebbench.spec.client import ClientOptions

__all__ = ["ClientOptions", "DriveResult", "drive"]

"""How far simulated answers can be trusted on this machine: runs predicted from measured step times, then measured."""

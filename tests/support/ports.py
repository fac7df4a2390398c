"""Ports for the processes that tests start: tests and launches that run at the same time get others."""

from waystation._ports import claimed_ports

__all__ = ["claimed_ports"]

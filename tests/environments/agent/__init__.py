"""Agents of the environment `agent`, in real boxes."""

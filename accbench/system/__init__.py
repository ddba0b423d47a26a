"""This machine and this process: signals, streams, folders, installed packages."""

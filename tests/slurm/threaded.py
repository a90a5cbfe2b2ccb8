"""A module that must not be preloaded: it leaves a thread behind."""

import threading


def preload() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()

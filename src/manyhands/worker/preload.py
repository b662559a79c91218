"""Imports what every worker needs, so that workers forked afterwards start at once."""

import torchvision  # noqa: F401 - the import is the purpose

import manyhands.train.loop  # noqa: F401

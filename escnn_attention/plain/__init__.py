"""The layers as plain torch modules, which need no escnn: what ``export()`` returns."""

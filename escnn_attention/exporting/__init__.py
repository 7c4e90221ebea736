"""Exports: programs of ``torch.export``, ONNX files and packages of AOTInductor.

- :mod:`~escnn_attention.exporting.mode` says whether PyTorch is exporting;
- :mod:`~escnn_attention.exporting.loops` has the loop of a program;
- :mod:`~escnn_attention.exporting.packaged` links compiled loops into packages;
- :mod:`~escnn_attention.exporting.modules` exports escnn's modules, and compiles packages.
"""

"""GraphKiln compiles machine-learning networks for large clusters as explicit, content-addressed stages."""

__version__ = "0.1.0"

"""The benchmark suite behind ``nologits bench``. The library never imports it."""

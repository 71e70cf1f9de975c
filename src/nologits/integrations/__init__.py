"""Generation loops of other libraries, with the draw done here. Each module imports its library; nothing here does."""

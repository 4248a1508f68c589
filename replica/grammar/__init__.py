"""What structured output may cost an engine: grammars are checked in a process of their own, and
their time in the engine is bounded."""

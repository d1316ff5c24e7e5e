"""``python -m jitconv`` is the ``jitconv`` command."""

from jitconv.cli import main

if __name__ == "__main__":
    main()

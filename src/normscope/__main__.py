"""``python -m normscope``, as ``torchrun -m normscope`` needs it."""

from normscope.cli import main

if __name__ == "__main__":
    main()

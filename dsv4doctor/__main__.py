"""`python -m dsv4doctor` is the same as the `dsv4doctor` command."""

from dsv4doctor.cli import main

if __name__ == "__main__":
    main()

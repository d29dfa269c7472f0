"""Entry point: `TARGET_PYTHON path/to/worker REQUEST`; the request file names the event pipe.

The folder is loaded as a package under a private name, so that neither its modules nor
dsv4doctor's site-packages can stand in the way of what the target interpreter imports.
"""

import importlib.util
import os
import sys

NAME = "_dsv4doctor_worker"


def load():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.util.spec_from_file_location(
        NAME, os.path.join(here, "__init__.py"), submodule_search_locations=[here]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    return importlib.import_module(NAME + ".serve")


if __name__ == "__main__":
    load().main()

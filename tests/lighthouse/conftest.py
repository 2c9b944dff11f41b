import pytest

from tests.lighthouse.lighthouse_process import LighthouseProcess


@pytest.fixture
def lighthouses():
    """Starts real lighthouses; all are stopped at the end."""
    started = []

    def start(*options, **more):
        started.append(LighthouseProcess(*options, **more))
        return started[-1]

    yield start
    for lighthouse in started:
        lighthouse.stop()

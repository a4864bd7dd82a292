import sys
from tests.storage.samples import X

def test_a() -> None:
    assert X == 1
    print(sys.modules["tests"], sys.modules["tests"].__path__)

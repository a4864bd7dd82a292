from graphkiln.tasks.sandbox.pool import CompileJob
def test_smoke(make_pool):
    with make_pool() as pool:
        for i in range(3):
            r = pool.compile("misbehaving", CompileJob(graph="g", payload=b"p", payload_format="f", settings={"do":"echo"}))
            print(r)

# One image for CPU, TPU and CUDA: docker build --build-arg EXTRA=tpu -t mstrain .
# EXTRA is cpu, tpu, cuda12 or cuda13. launch/jobset.yaml names the image.
FROM python:3.12-slim
ARG EXTRA=cpu
WORKDIR /mstrain
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY mstrain mstrain
COPY research research
COPY train.py benchmark.py plan.py ./
RUN case "$EXTRA" in \
        cpu) extras=plan ;; \
        tpu | cuda12 | cuda13) extras="plan,$EXTRA" ;; \
        *) echo "EXTRA=$EXTRA is not one of cpu, tpu, cuda12, cuda13" >&2; exit 2 ;; \
    esac && pip install --no-cache-dir ".[$extras]"
ENTRYPOINT ["mstrain"]
CMD ["--help"]

//@ name transform_to_logistic
//@ size 500000
//@ prompt
/* Replace each element v of x by 1 / (1 + exp(-v)).
{model}   Example:

   input: [0, 2]
   output: [0.5, 0.880797]
*/
void toLogistic(std::vector<double> &x) {
//@ serial
    for (double &value : x) value = 1.0 / (1.0 + std::exp(-value));
}
//@ omp
    #pragma omp parallel for
    for (size_t i = 0; i < x.size(); i += 1) x[i] = 0.5 + 0.5 * std::tanh(0.5 * x[i]);
}
//@ driver
struct Case {
    std::vector<double> x;
};

Case draw(size_t size, Random &random) {
    Case made;
    for (size_t i = 0; i < size; i += 1) made.x.push_back(uniform(random, -9, 9));
    return made;
}

void sample(Case &c) { toLogistic(c.x); }
void best(Case &c) { reference::toLogistic(c.x); }
bool same(Case const &got, Case const &wanted) { return near(got.x, wanted.x); }
